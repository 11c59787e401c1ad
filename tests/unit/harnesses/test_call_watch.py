"""The watch between an agent and the proxy: bytes go through as they are, and each call is held for its snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rolltap.harnesses.base import Endpoint
from rolltap.harnesses.runner.call_watch import CallWatch

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Moments:
    """In place of snapshots: what was taken, and which calls were told."""

    def __init__(self) -> None:
        self.taken = 0
        self.calls: dict[str, int] = {}
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def take(self) -> int:
        await self.may_go.wait()
        self.taken += 1
        return self.taken

    def asked(self, call_id: str, number: int) -> None:
        self.calls[call_id] = number


def request(method: str, body: bytes = b"") -> bytes:
    return f"{method} /s/key/v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def whole(call: str, body: bytes = b"{}") -> bytes:
    head = f"X-Rolltap-Call: {call}\r\n" if call else ""
    return f"HTTP/1.1 200 OK\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


STREAMED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nx-rolltap-call: two\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nabcde\r\n0\r\n\r\n"
)


async def talk(moments: Moments, sent: list[bytes], replies: list[bytes], step: int) -> tuple[bytes, bytes]:
    """What reached the proxy, and what reached the agent, with `step` bytes at a time from the proxy."""
    arrived = bytearray()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for expected, reply in zip(sent, replies, strict=True):
            arrived.extend(await reader.readexactly(len(expected)))
            for at in range(0, len(reply), step):
                writer.write(reply[at : at + step])
                await writer.drain()
        arrived.extend(await reader.read())
        writer.close()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, CallWatch(Endpoint(f"http://127.0.0.1:{port}/s/key", "key", "m"), moments) as watch:  # type: ignore[arg-type]
        assert watch.endpoint.base_url.endswith("/s/key")
        host, _, to = watch.endpoint.base_url.removeprefix("http://").removesuffix("/s/key").partition(":")
        reader, writer = await asyncio.open_connection(host, int(to))
        received = bytearray()
        for each, reply in zip(sent, replies, strict=True):
            writer.write(each)
            received.extend(await reader.readexactly(len(reply)))
        writer.write_eof()
        received.extend(await reader.read())
        writer.close()
    return bytes(arrived), bytes(received)


@pytest.mark.parametrize("step", [1, 7, 1 << 16])
async def test_bytes_go_through_and_calls_get_their_snapshots(step: int) -> None:
    moments = Moments()
    sent = [
        request("POST", b"{}"),
        request("GET"),
        request("POST", b"x" * 300_000),
        request("POST"),
        b"not HTTP\0\r\n\r\n",
    ]
    replies = [whole("one"), whole(""), STREAMED, whole("three", b"y" * 200_000), b"\0neither"]
    arrived, received = await talk(moments, sent, replies, step)
    assert arrived == b"".join(sent)
    assert received == b"".join(replies)
    assert moments.calls == {"one": 1, "two": 2, "three": 3}


async def test_a_call_is_held_until_its_snapshot_is_taken() -> None:
    moments, seen = Moments(), asyncio.Event()
    moments.may_go.clear()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        seen.set()
        writer.close()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    port: Any = server.sockets[0].getsockname()[1]
    async with server, CallWatch(Endpoint(f"http://127.0.0.1:{port}/s/key", "key", "m"), moments) as watch:  # type: ignore[arg-type]
        _, writer = await asyncio.open_connection("127.0.0.1", int(watch.endpoint.base_url.split(":")[2].split("/")[0]))
        writer.write(request("POST"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(seen.wait(), 0.2)
        moments.may_go.set()
        await asyncio.wait_for(seen.wait(), 5)
        writer.close()
