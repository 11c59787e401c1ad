"""A stand-in for the server over real HTTP: the admin plane's ledger in memory, and a model that follows a script."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rolltap.contract.admin import SessionKey
from rolltap.types import Group, GroupStatus, Rollout, RolloutStatus

Reply = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Messages so far → the assistant message."""


def tool_call(command: str, number: int = 0) -> dict[str, Any]:
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "bash", "arguments": json.dumps({"command": command})},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _rollout(rollout: str, status: str, attempt: int) -> dict[str, Any]:
    return msgspec.to_builtins(Rollout(rollout, "group", "task", 0, RolloutStatus(status), attempt))


@dataclass
class Stub:
    """What the server has seen, and how it answers. `url` is both planes' address."""

    reply: Reply
    groups_allowed: int = 10**9
    context: int = 0  # of the policy, in tokens
    infra_retries: int = 3
    bad_gateways: int = 0  # answers to `finish` that a balancer gives in the server's place
    answered: bool = True  # whether closed sessions have an answer on record
    cut_off: str = ""  # the finish reason of replies that are not whole
    refuse_finish: str = ""  # the status in which every rollout was ended elsewhere
    url: str = ""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)  # key → session
    logs: dict[str, dict[str, Any]] = field(default_factory=dict)  # by session
    closed: set[str] = field(default_factory=set)
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)  # of the infrastructure, by rollout
    rewards: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)  # rollouts for nodes: id and task
    held: dict[str, str] = field(default_factory=dict)  # rollout → node
    claimed: dict[str, dict[str, Any]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    late_calls: int = 0
    refusals: int = 0
    _ids: Any = field(default_factory=itertools.count)

    def open(self) -> int:
        return sum(any(r["id"] not in self.finished for r in g["rollouts"]) for g in self.groups.values())

    async def open_group(self, request: web.Request) -> web.Response:
        if self.open() >= self.groups_allowed:
            self.refusals += 1
            error = {"code": "rate_limit_exceeded", "message": "too many groups are outstanding", "param": None}
            return web.json_response({"error": error}, status=429, headers={"Retry-After": "0.02"})
        body = await request.json()
        task_id = body["task"]["id"]
        rollouts = tuple(Rollout(f"{body['id']}-{n}", body["id"], task_id, n) for n in range(body["n"]))
        group = Group(body["id"], task_id, "tiny", GroupStatus.OPEN, rollouts)
        return web.json_response(self.groups.setdefault(body["id"], {**body, **msgspec.to_builtins(group)}))

    async def start(self, request: web.Request) -> web.Response:
        rollout = request.match_info["id"]
        self.attempts[rollout] = self.attempts.get(rollout, 0) + 1
        return self._session(attempt=self.attempts[rollout], model="tiny", roles={}, turns=0)

    async def open_session(self, request: web.Request) -> web.Response:
        return self._session()

    def _session(self, **attempt: Any) -> web.Response:
        session = f"s{next(self._ids)}"
        self.sessions[f"key-{session}"] = session
        expiry, url = time.time() + 60, f"{self.url}/s/{session}"
        key = SessionKey(session, f"key-{session}", url, expiry, "default", context=self.context)
        return web.json_response(msgspec.to_builtins(key) | attempt)

    async def finish(self, request: web.Request) -> web.Response:
        rollout = request.match_info["id"]
        if self.bad_gateways > 0:
            self.bad_gateways -= 1
            return web.Response(status=502, text="<html>502 Bad Gateway</html>", content_type="text/html")
        if self.refuse_finish:
            error = {"code": "ledger_error", "message": f"the rollout has ended as {self.refuse_finish}"}
            return web.json_response({"error": error}, status=409)
        assert rollout not in self.finished, "two terminal states"
        body = await request.json()
        failures = self.failures.setdefault(rollout, [])
        if body.get("cause") == "infrastructure" and len(failures) < self.infra_retries:
            failures.append(body["reason"])
            self.pending += [self.claimed[rollout]] if rollout in self.claimed else []
            return web.json_response(_rollout(rollout, "pending", body.get("attempt", 0) + 1))
        self.finished[rollout] = body
        return web.json_response(_rollout(rollout, body["status"], body.get("attempt", 0)))

    async def claim(self, request: web.Request) -> web.Response:
        node, asked = request.match_info["node"], await request.json()
        given, self.pending = self.pending[: asked["capacity"]], self.pending[asked["capacity"] :]
        for rollout in given:
            self.held[rollout["rollout_id"]] = node
            self.claimed[rollout["rollout_id"]] = rollout
        if not given:
            await asyncio.sleep(min(asked["wait"], 0.02))
        return web.json_response({"rollouts": given})

    async def waiting(self, request: web.Request) -> web.Response:
        return web.json_response({"waiting": bool(self.pending)})

    async def heartbeat(self, request: web.Request) -> web.Response:
        own = [rollout for rollout, node in self.held.items() if node == request.match_info["node"]]
        return web.json_response({"node": request.match_info["node"], "rollouts": own})

    async def release(self, request: web.Request) -> web.Response:
        self.released.append(request.match_info["node"])
        return web.json_response({})

    async def show_rollout(self, request: web.Request) -> web.Response:
        rollout = _rollout(request.match_info["id"], self.refuse_finish, 1)
        nothing = {"reward": None, "session": None, "evaluation": "", "attempts": 1}
        return web.json_response({"rollout": rollout, **nothing})

    async def close(self, request: web.Request) -> web.Response:
        self.closed.add(request.match_info["id"])
        closed = {"session_id": request.match_info["id"], "capped": False, "answered": self.answered, "findings": []}
        return web.json_response(closed)

    async def log(self, request: web.Request) -> web.Response:
        assert request.match_info["id"] in self.closed, "compared before the session is closed"
        body = self.logs[request.match_info["id"]] = await request.json()
        return web.json_response({"verdict": "none", "text": body["problem"]})

    async def reward(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["rollout_id"] not in self.finished, "a reward after the end"
        if body["scope"] == "nowhere":
            error = {"code": "invalid_request", "message": "no reward scope 'nowhere'", "param": "scope"}
            return web.json_response({"error": error}, status=400)
        self.rewards.append(body)
        return web.json_response({})

    async def chat(self, request: web.Request) -> web.Response:
        session = self.sessions[request.headers["Authorization"].removeprefix("Bearer ")]
        assert session == request.match_info["session"]
        if session in self.closed:
            self.late_calls += 1
            return web.json_response({"error": {"code": "session_closed", "message": "closed"}}, status=409)
        body = await request.json()
        self.calls.setdefault(session, []).append(body)
        message = self.reply(body["messages"])
        finish = self.cut_off or ("tool_calls" if message.get("tool_calls") else "stop")
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
            }
        )

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/groups", self.open_group),
                web.post("/rollouts/{id}/start", self.start),
                web.post("/rollouts/{id}/finish", self.finish),
                web.get("/nodes/waiting", self.waiting),
                web.post("/nodes/{node}/claim", self.claim),
                web.post("/nodes/{node}/heartbeat", self.heartbeat),
                web.post("/nodes/{node}/release", self.release),
                web.get("/read/rollouts/{id}", self.show_rollout),
                web.post("/sessions", self.open_session),
                web.post("/sessions/{id}/close", self.close),
                web.post("/sessions/{id}/log", self.log),
                web.post("/rewards", self.reward),
                web.post("/s/{session}/v1/chat/completions", self.chat),
            ]
        )
        return app


@asynccontextmanager
async def running(stub: Stub) -> AsyncIterator[Stub]:
    runner = web.AppRunner(stub.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    stub.url = f"http://127.0.0.1:{port}"
    try:
        yield stub
    finally:
        await runner.cleanup()
