"""Authenticates requests of the trainer and admin planes before their bodies are read.

FastAPI reads and parses a body before it checks the key. The gate requires a key of the plane for every request with a
body, reads the body within its size limit and deadline, and passes the complete request to the application. The
application decides, route by route, what a key may do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rolltap.errors import BodyTooLarge, RolltapError
from rolltap.protocols.base import WireReply
from rolltap.proxy.call.http_exchange import ClientGone, HttpExchange
from rolltap.proxy.metrics.calls import CountedSend, uncounted
from rolltap.tenants import NOBODY, acting_for

AdmitKey = Callable[[str], Awaitable[None]]
"""Raises `Unauthenticated` or `Forbidden` for a key that no route of the plane takes."""

SEND_LESS = (
    "; send less at a time: a submission's tasks in parts (`first`, `total`), as rolltap's clients do, and a task's "
    "files in a `folder` or a `repository`"
)
"""What to do about a body that is too large."""


class Gate:
    """An ASGI application that wraps a plane's. `most_bytes` (of a path) and `receipt_s` limit bodies."""

    def __init__(
        self,
        app: Any,
        admit: AdmitKey,
        most_bytes: Callable[[str], int],
        receipt_s: float,
        counted: CountedSend = uncounted,
    ) -> None:
        self.app = app
        self._admit = admit
        self._most_bytes = most_bytes
        self._receipt_s = receipt_s
        self._counted = counted

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with acting_for(NOBODY):  # until the key is known
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        send = self._counted(send)
        http = HttpExchange(scope, receive, send)
        if not http.announced():
            await self.app(scope, receive, send)
            return
        try:
            await self._admit(_key(scope["headers"]))
            body = await http.body(self._most_bytes(scope["path"]), self._receipt_s)
        except ClientGone:
            return
        except RolltapError as error:
            advice = SEND_LESS if isinstance(error, BodyTooLarge) else ""
            reason = {"code": error.code, "message": error.message + advice, "param": error.param}
            body = msgspec.json.encode({"error": reason})
            await http.refuse(WireReply(error.status, body, {"content-type": "application/json"}))
            return
        await self.app(scope, _Whole(body, receive), send)


class _Whole:
    """An ASGI `receive` that returns a body that was read already, then the connection's messages."""

    def __init__(self, body: bytes, receive: Any) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Any:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _key(headers: Any) -> str:
    """The request's bearer key; empty if it has none."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
    return ""
