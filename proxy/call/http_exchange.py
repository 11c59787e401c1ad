"""One HTTP exchange over ASGI: the body in within its limits, the reply out, and the client's departure noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rolltap.errors import BodyTooLarge, RequestError
from rolltap.proxy.dialects.base import WireReply

if TYPE_CHECKING:
    from rolltap.proxy.call.body_reader import HeldRoom

WATCH_AFTER_S = 0.1

DISCARDED_BYTES = 1 << 20
DISCARDED_S = 1.0
"""How much of a refused body is thrown away, and for how long."""


class ClientGone(Exception):
    """The client hung up before its reply was whole."""


class BrokenReply(Exception):
    """Raised through the server to cut the connection: a reply that can't be finished must not look finished."""


class RequestTimeout(RequestError):
    """The request did not arrive in time."""

    status = 408
    code = "request_timeout"


class HttpExchange:
    """The connection of one request, as the path of a call sees it."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._received = False
        self.received_bytes = 0  # of the body
        self.room: HeldRoom | None = None  # that the body holds until it is read
        self.started = False
        self.gone = False

    async def body(self, limit: int, deadline: float) -> bytes:
        """The whole body of at most `limit` bytes, received within `deadline` seconds.

        One that says itself that it is longer is refused before it comes.
        """
        self.check_announced(limit)
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(deadline):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.gone = True
                        raise ClientGone
                    chunks.append(message.get("body", b""))
                    self.received_bytes += len(chunks[-1])
                    if self.received_bytes > limit:
                        raise BodyTooLarge(f"the request body is over {limit} bytes")
                    if not message.get("more_body"):
                        self._received = True
                        return b"".join(chunks)
        except TimeoutError:
            raise RequestTimeout(f"the request did not arrive within {deadline:g} s") from None

    def check_announced(self, limit: int) -> None:
        """Refuses a body that says itself that it is over `limit` bytes."""
        if self.announced() > limit:
            raise BodyTooLarge(f"the request body is over {limit} bytes")

    def announced(self) -> int:
        """The body's length as the request's head says it, which the server has checked; -1: it comes in chunks."""
        for name, value in self.scope["headers"]:
            if name == b"content-length":
                return int(value)
            if name == b"transfer-encoding":
                return -1
        return 0

    def release_room(self) -> None:
        """The body is read, or will not be."""
        if self.room is not None:
            self.room.release()

    async def reply(self, reply: WireReply) -> None:
        """A whole answer."""
        length = {"content-length": str(len(reply.body))}
        await self.start(reply.status, {**reply.headers, **length})
        await self._send({"type": "http.response.body", "body": reply.body})

    async def refuse(self, reply: WireReply) -> None:
        """A whole answer to a request whose body may not have come: the rest of it is not taken.

        A little of it is thrown away first, so that its sender gets to read the answer; then the connection ends.
        """
        if self._received or not self.announced():
            await self.reply(reply)
            return
        length = {"content-length": str(len(reply.body)), "connection": "close"}
        await self.start(reply.status, {**reply.headers, **length})
        await self.write(reply.body)
        budget = DISCARDED_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARDED_S):
                while budget > 0 and (message := await self._receive()).get("more_body"):
                    budget -= len(message["body"])
        await self.end(b"")

    async def start_stream(self, content_type: str) -> None:
        await self.start(200, {"content-type": content_type, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of an answer whose body follows in pieces."""
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def while_connected(self) -> WhileConnected:
        """Runs its block until the client hangs up, which raises `ClientGone` inside it at once."""
        return WhileConnected(self)

    def look(self) -> None:
        """Notices a client that has hung up already. One step of `receive` shows it: it would wait for any other."""
        receiving = self._receive()
        try:
            receiving.send(None)
        except StopIteration as end:
            self.gone = self.gone or end.value["type"] == "http.disconnect"
        else:
            receiving.close()

    async def disconnected(self) -> None:
        """Returns when the client has hung up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True


class WhileConnected:
    """Cancels the block that it is around when the client hangs up.

    The watch begins after `WATCH_AFTER_S`: a reply that comes at once costs no task for it, only a look at its end.
    """

    __slots__ = ("_http", "_task", "_timer", "_watcher")

    def __init__(self, http: HttpExchange) -> None:
        self._http = http
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        elif kind is None:  # after a cancellation it would take the server's stop for a client that left
            self._http.look()
        if kind is asyncio.CancelledError and self._http.gone:
            self._task.uncancel()
            raise ClientGone from None

    def _begin(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        await self._http.disconnected()
        self._task.cancel()
