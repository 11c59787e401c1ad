"""Parts of a response that are written past ASGI's `send`, over real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httptools
import pytest

from rolltap.proxy.front.connections import ReplyParts, reply_parts
from rolltap.proxy.server import Front, bind, serve
from rolltap.settings import LimitSettings, ListenSettings

PIECE = 1 << 16
App = Callable[[ReplyParts, Callable[..., Awaitable[None]]], Awaitable[None]]


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    """The port of a plane whose replies `app` writes, by parts and by `send`."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        parts = reply_parts(scope)
        assert parts is not None
        await app(parts, send)

    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    front = Front(LimitSettings(), ListenSettings())
    serving = asyncio.create_task(serve({"agent": (asgi, listener)}, stop, front))
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        await serving


async def start(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def body(send: Any, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


class Body:
    """Collects a response's body. httptools calls the `on_...` methods."""

    def __init__(self) -> None:
        self.data, self.is_whole = bytearray(), False

    def on_body(self, data: bytes) -> None:
        self.data += data

    def on_message_complete(self) -> None:
        self.is_whole = True


def asked(port: int, requests: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(requests)
    return client


GET = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


async def test_a_client_that_does_not_read_is_waited_for() -> None:
    written, closed = 0, asyncio.Event()

    async def app(parts: ReplyParts, send: Any) -> None:
        nonlocal written
        assert not parts.open
        await start(send)
        while parts.open and written < 1000:
            parts.write(b"%06d" % written + b"x" * PIECE)
            written += 1
        closed.set()
        await body(send, b"%06d" % written + b"x" * PIECE)  # waits until the client has read enough
        assert parts.open
        parts.write(b"last")
        await body(send, b"", more=False)
        assert not parts.open

    async with serving(app) as port:
        client = await asyncio.to_thread(asked, port, GET)
        await closed.wait()
        assert 0 < written < 1000
        reply, parser_done = Body(), False
        parser = httptools.HttpResponseParser(reply)
        while not parser_done:
            parser.feed_data(await asyncio.to_thread(client.recv, 1 << 20))
            parser_done = reply.is_whole
        client.close()
    assert reply.data.endswith(b"last")
    numbers = [int(reply.data[at : at + 6]) for at in range(0, len(reply.data) - 4, PIECE + 6)]
    assert numbers == list(range(written + 1))


async def test_parts_belong_to_their_own_response() -> None:
    """The second request arrives while the first is answered."""
    ask_twice, count = asyncio.Event(), 0

    async def app(parts: ReplyParts, send: Any) -> None:
        nonlocal count
        count += 1
        name = b"%d" % count
        await start(send)
        await ask_twice.wait()
        parts.write(name + b" part")
        await body(send, b"", more=False)

    async with serving(app) as port:
        client = await asyncio.to_thread(asked, port, GET)
        while count < 1:  # noqa: ASYNC110  the application is asked from outside
            await asyncio.sleep(0)
        await asyncio.to_thread(client.sendall, GET)
        await asyncio.sleep(0.05)
        ask_twice.set()
        received = b""
        while received.count(b"0\r\n\r\n") < 2:
            received += await asyncio.to_thread(client.recv, 1 << 16)
        client.close()
    assert received.count(b"HTTP/1.1 200") == 2
    assert received.index(b"1 part") < received.index(b"2 part")


@pytest.mark.parametrize("request_line", [b"HEAD / HTTP/1.1", b"GET / HTTP/1.1"])
async def test_a_body_of_a_known_length_has_no_parts(request_line: bytes) -> None:
    seen: list[bool] = []

    async def app(parts: ReplyParts, send: Any) -> None:
        headers = [] if request_line.startswith(b"HEAD") else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        seen.append(parts.open)
        await body(send, b"ok", more=False)

    async with serving(app) as port:
        client = await asyncio.to_thread(asked, port, request_line + GET[14:])
        await asyncio.to_thread(client.recv, 1 << 16)
        client.close()
    assert seen == [False]
