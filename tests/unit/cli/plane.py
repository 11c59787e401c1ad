"""A stand-in for a server's admin plane, which answers from a table and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from rolltap.contract.admin import Submission
from rolltap.contract.control import PolicyStatus, RolloutControl


def summary(id: str, **fields: Any) -> dict[str, Any]:
    """A session as the list has it, in JSON."""
    return {"id": id, "policy": "p", "created_at": 0.0, "expires_at": 0.0} | fields


def shown(id: str, *, policy: str = "p", **detail: Any) -> dict[str, Any]:
    """A session as `GET /read/sessions/{id}` shows it."""
    return {"summary": summary(id, policy=policy), "calls": [], "report": {}, "notes": []} | detail


def served(
    name: str, *, relayed: tuple[str, ...] = (), context: int = 0, groups: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """A policy as `GET /policies/{name}` shows it."""
    status = PolicyStatus(
        name=name,
        version=0,
        tokenizer_hash="",
        policy=name,
        engine="main",
        trainable=not relayed,
        relayed=relayed,
        context=context,
        groups=groups or {},
        rollouts={},
        outstanding=0,
        room=None,
        zero_variance=0,
        staleness={},
        abandoned=0,
        control=RolloutControl(),
    )
    return msgspec.to_builtins(status, str_keys=True)


def submission(id: str = "one", **fields: Any) -> Submission:
    """A submission of one task."""
    nothing = {"roles": {}, "also": (), "priority": 0, "tags": (), "created_at": 0.0, "cancelled": False, "late": 0}
    progress = {"queued": 0, "groups": {}, "rollouts": {}, "reward_mean": None, "waits_for": "", "ended": False}
    return Submission(**{"id": id, "policy": "p", "n": 1, "tasks": 1} | nothing | progress | fields)


def call_line(id: str, **fields: Any) -> dict[str, Any]:
    texts = dict.fromkeys(("session_id", "policy", "agent", "kind", "rule", "mask", "dialect", "model", "engine"), "")
    nothing = dict.fromkeys(("parent_id", "finished_at", "finish", "flaw", "break_", "delivered", "retry_of"))
    numbers = dict.fromkeys(("created_at", "prompt_tokens", "output_tokens", "shared"), 0)
    more = {"id": id, "outcome": "completed", "error": "", "preview": "", "versions": [], "tool_calls": []}
    return texts | nothing | numbers | more | fields


@dataclass
class StubPlane:
    """`replies` maps "METHOD /path" to the JSON body of a 200. `known` is false for one that knows no key."""

    replies: dict[str, Any]
    known: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path, authorization
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def stub_plane(replies: dict[str, Any], *, known: bool = True) -> Iterator[StubPlane]:
    plane = StubPlane(replies, known)

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            name = f"{self.command} {self.path}"
            plane.requests.append((name, self.headers["authorization"]))
            status = 200 if name in replies else 404
            answer = replies.get(name, {"error": {"message": f"no {name}"}})
            if not plane.known:
                status, answer = 401, {"error": {"code": "invalid_api_key", "message": "the key is not known"}}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        plane.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield plane
        finally:
            server.shutdown()
