"""A trainer plane in memory: what the server promises trainers, over real HTTP, with faults on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from rolltap import wire
from rolltap.contract.control import PolicyStatus, RolloutControl
from rolltap.contract.trainer import Lease, LeasedGroup
from rolltap.errors import (
    EngineUnavailable,
    InvalidRequest,
    LeaseLost,
    LedgerError,
    RolltapError,
    StepRegression,
    TrainerFenced,
    Unauthenticated,
    UnknownPolicy,
    VersionTaken,
)

KEY = "rt-trainer-test"
TEACHER = "teacher"
"""Another policy of the plane, which only scores."""


@dataclass(slots=True)
class Held:
    """A lease as the plane keeps it."""

    token: int
    groups: list[LeasedGroup]
    step: int | None = None
    over: bool = False


@dataclass(slots=True)
class Plane:
    """Groups wait in `ready`; what trainers did is in `calls`, `acked`, `refused` and `pushed`.

    `lose` are leases that will be somebody else's when they are acknowledged; `fail_next` drops the connection of that
    many coming requests. `balancer` holds what a balancer answers to coming requests: a status and a body each.
    """

    policy: str = "policy"
    version: int = 0
    tokenizer_hash: str = ""
    ready: list[LeasedGroup] = field(default_factory=list)
    leases: dict[str, Held] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    acked: dict[str, int] = field(default_factory=dict)
    refused: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    pushed: list[tuple[str, int]] = field(default_factory=list)
    adapters: list[bool] = field(default_factory=list)  # whether each push was of an adapter
    controls: list[dict[str, Any]] = field(default_factory=list)
    control: RolloutControl = field(default_factory=RolloutControl)  # as it was before the trainer
    control_run: str | None = None
    digests: dict[int, str] = field(default_factory=dict)  # by version
    lose: set[str] = field(default_factory=set)
    fail_next: int = 0
    balancer: list[tuple[int, bytes]] = field(default_factory=list)
    cold: int = 0  # how many coming controls are refused, as the engine has not answered yet
    stale: int = 0  # groups that nobody may lease any more
    rollouts: dict[str, int] = field(default_factory=dict)  # by status
    unanswered: int = 0  # of those
    untrained: int = 0  # dropped groups
    last_step: int | None = None
    incarnation: int = 0
    paused: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def offer(self, *groups: LeasedGroup) -> None:
        with self.changed:
            self.ready.extend(groups)
            self.changed.notify_all()

    def forget(self) -> None:
        """As if nothing had happened yet."""
        self.ready, self.leases, self.acked, self.lose = [], {}, {}, set()
        self.last_step, self.version, self.digests = None, 0, {}

    @property
    def replayed(self) -> list[tuple[str, int]]:
        """Every group that came back, with the step that it is part of."""
        acknowledged = [(held.step, held.groups) for held in self.leases.values() if held.step is not None]
        return [(one.group.id, step) for step, groups in acknowledged for one in groups if one.replay]

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def serve(self, method: str, path: str, body: dict[str, Any]) -> bytes:
        """The answer to one request; errors are raised as the server's."""
        parts = path.strip("/").split("/")
        with self.changed:
            if method == "GET" and parts[0] == "trainers":
                return json.dumps({"incarnation": self.incarnation}).encode()
            self.calls.append((parts[-1] if method == "POST" else "policy", body))
            if "run" not in body and body.get("incarnation", self.incarnation) != self.incarnation:
                raise TrainerFenced(f"incarnation {self.incarnation} owns {self.policy}")
            match parts:
                case ["leases"]:
                    return self._lease(body)
                case ["leases", lease_id, verb]:
                    self.changed.notify_all()
                    return json.dumps(self._on_lease(lease_id, verb, body)).encode()
                case ["trainers", _, "rewind"]:
                    return json.dumps(self._rewind(body["step"], body["versions"])).encode()
                case ["policies", name, *verb]:
                    return json.dumps(self._on_policy(name, verb, body)).encode()
        raise InvalidRequest(f"no route {path}")

    def _lease(self, body: dict[str, Any]) -> bytes:
        if body["policy"] != self.policy:
            raise UnknownPolicy(f"no policy {body['policy']!r}; known: {self.policy}", param="policy")
        if body.get("replay") is not None:
            return self._replay(body)
        self.changed.wait_for(lambda: len(self.ready) >= body["at_least"], timeout=body["wait"])
        taken, self.ready = self.ready[: body["groups"]], self.ready[body["groups"] :]
        if not taken:
            return b""
        taken = [replace(group, staleness=self.version - group.oldest_version) for group in taken]
        token = len(self.leases) + 1
        self.leases[f"lease-{token}"] = Held(token, taken)
        return wire.pack(
            Lease(f"lease-{token}", body["trainer"], self.policy, token, body["ttl"], self.version, tuple(taken))
        )

    def _replay(self, body: dict[str, Any]) -> bytes:
        """Acknowledged groups again, the newest first."""
        trained = [group for held in self.leases.values() if held.step is not None for group in held.groups]
        again = [replace(group, replay=True) for group in reversed(trained) if not group.replay][: body["groups"]]
        if not again:
            return b""
        token = len(self.leases) + 1
        self.leases[f"lease-{token}"] = Held(token, again)
        return wire.pack(
            Lease(f"lease-{token}", body["trainer"], self.policy, token, body["ttl"], self.version, tuple(again))
        )

    def _on_lease(self, lease_id: str, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        held = self.leases.get(lease_id)
        if held is None or held.token != body["token"] or (lease_id in self.lose and verb == "ack"):
            raise LeaseLost(f"lease {lease_id} is somebody else's")
        if verb == "ack" and held.step == body["step"]:
            return {"groups": len(held.groups)}
        if verb == "annotations":
            return {"added": len(body["calls"])}
        if held.over:
            raise LeaseLost(f"lease {lease_id} is over")
        if verb == "extend":
            return {"expires_in": body["ttl"]}
        held.over = True
        if verb == "ack":
            if self.last_step is not None and body["step"] < self.last_step:
                raise StepRegression(f"step {body['step']} is behind {self.last_step}", param="step")
            held.step = self.last_step = body["step"]
            self.acked.update({group.group.id: body["step"] for group in held.groups if not group.replay})
            return {"groups": len(held.groups)}
        if verb == "nack":
            self.refused.append((body["reason"], tuple(body["blamed"])))
            self.ready += [group for group in held.groups if body["blamed"] and group.group.id not in body["blamed"]]
            return {"dead": 0}
        self.ready = [*(group for group in held.groups if not group.replay), *self.ready]
        return {"lease_id": lease_id}

    def _rewind(self, step: int, versions: dict[str, int]) -> dict[str, Any]:
        restored = {name: one if one >= self.version else self.version + 1 for name, one in versions.items()}
        self.incarnation += 1
        back: dict[str, Any] = {
            "acknowledged": 0, "leased": 0, "versions": restored, "incarnation": self.incarnation,
            "last_step": self.last_step,
        }  # fmt: skip
        for held in reversed(self.leases.values()):
            taken = [group for group in held.groups if not group.replay]  # replayed ones stay acknowledged
            if held.step is not None and held.step > step:
                back["acknowledged"] += len(taken)
                self.ready = [*taken, *self.ready]
                for group in taken:
                    del self.acked[group.group.id]
                held.step = None
            elif not held.over:
                back["leased"] += len(taken)
                self.ready = [*taken, *self.ready]
                held.over = True
        if self.last_step is not None:
            self.last_step = min(self.last_step, step)
        return back

    def _on_policy(self, name: str, verb: list[str], body: dict[str, Any]) -> dict[str, Any]:
        if name == TEACHER and verb == ["score"]:
            ids = [asked["token_ids"][asked["start"] :] for asked in body["sequences"]]
            return {"policy": name, "version": 0, "sequences": [{"logprobs": teacher_logprobs(one)} for one in ids]}
        if name not in (self.policy, TEACHER):
            raise UnknownPolicy(f"no policy {name!r}; known: {self.policy}", param="policy")
        if verb == ["push"]:
            if body["version"] < self.version:
                raise LedgerError(f"version {body['version']} is behind {self.version}", param="version")
            if self.digests.setdefault(body["version"], body["digest"]) != body["digest"]:
                raise VersionTaken(f"version {body['version']} stands for other weights", param="version")
            self.pushed.append((body["path"], body["version"]))
            self.adapters.append(body["adapter"])
            self.version = body["version"]
        elif verb == ["control"] and self.cold:
            self.cold -= 1
            raise EngineUnavailable("engine e has not answered yet")
        elif verb == ["control"]:
            self.controls.append({name: value for name, value in body["control"].items() if value})
            return body["control"]
        elif verb:
            self.paused = body.get("mode")
        self.changed.notify_all()
        return msgspec.to_builtins(self._status(name), str_keys=True)

    def _status(self, name: str) -> PolicyStatus:
        return PolicyStatus(
            name,
            self.version,
            self.tokenizer_hash,
            self.paused,
            policy=name,
            engine="engine",
            trainable=name == self.policy,
            relayed=(),
            groups={"complete": len(self.ready), "stale": self.stale},
            rollouts=self.rollouts,
            unanswered=self.unanswered,
            untrained=self.untrained,
            outstanding=0,
            room=None,
            zero_variance=0,
            staleness={},
            abandoned=0,
            control=self.control,
            control_run=self.control_run,
        )


def teacher_logprobs(ids: Sequence[int]) -> list[float]:
    """What the plane's teacher says of ids."""
    return [-1.0 - token % 7 for token in ids]


@contextmanager
def running(plane: Plane, port: int = 0) -> Iterator[str]:
    """The plane on `port`, or on a free one; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._answer("POST")

        def do_GET(self) -> None:
            self._answer("GET")

        def _answer(self, method: str) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            if plane.fail_next > 0:
                plane.fail_next -= 1
                self.close_connection = True
                return
            if plane.balancer:
                self._send(*plane.balancer.pop(0))
                return
            try:
                if self.headers["authorization"] != f"Bearer {KEY}":
                    raise Unauthenticated("this is not a trainer key")
                self._send(200, plane.serve(method, self.path, body))
            except RolltapError as error:
                fields = {"code": error.code, "message": error.message, "param": error.param}
                self._send(error.status, json.dumps({"error": fields}).encode())

        def _send(self, status: int, body: bytes) -> None:
            is_empty = status == 200 and not body
            self.send_response(204 if is_empty else status)
            if not is_empty:
                self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
