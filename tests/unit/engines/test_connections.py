"""The HTTP client of the engines, against servers that answer byte for byte what a test says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from rolltap.errors import EngineTimeout
from rolltap.network import DEAD_AFTER_S, notice_death
from rolltap.proxy.engines import connections
from rolltap.proxy.engines.connections import ConnectionBroken, Connections
from rolltap.proxy.engines.http import EngineHttp
from rolltap.settings import EngineSettings

from ...faults.relay import relayed

OK = b"HTTP/1.1 200 OK\r\n"


@dataclass
class Server:
    """Answers the n-th request of every connection with the n-th script; the last one is repeated."""

    scripts: list[list[bytes]]
    requests: list[bytes] = field(default_factory=list)
    opened: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    close_after: bool = False
    url: str = ""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.tasks.append(asyncio.create_task(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.answer(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            writer.close()
            self.closed.set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while head := await read_head(reader):
            self.requests.append(head)
            for piece in self.scripts[min(count, len(self.scripts) - 1)]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            count += 1
            if self.close_after:
                break


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """A request with its body; b"" at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        return head + await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@asynccontextmanager
async def answering(*scripts: list[bytes], close_after: bool = False) -> AsyncIterator[Server]:
    server = Server(list(scripts), close_after=close_after)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in server.tasks:
            task.cancel()
        if server.tasks:
            await asyncio.wait(server.tasks)
        await asyncio.sleep(0)  # the transports close


@pytest.fixture
async def open_to() -> AsyncIterator[Callable[[str], Connections]]:
    opened: list[Connections] = []

    def make(url: str) -> Connections:
        opened.append(Connections(url, {"authorization": "Bearer k"}))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


async def ask(pool: Connections, method: str = "POST", path: str = "/v1/generate", body: bytes = b"{}") -> bytes:
    response = await pool.request(method, path, body, {"x-call": "c1"})
    try:
        return await response.read()
    finally:
        response.release()


@pytest.mark.parametrize(
    "script",
    [
        [OK + b"content-length: 5\r\n\r\nhello"],
        [OK + b"Content-Length: 5\r\n\r\n", b"he", b"llo"],
        [OK + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n", b"2\r\nlo\r\n0\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"content-length: 5\r\n\r\nhello"],
        [byte.to_bytes() for byte in OK + b"content-length: 5\r\n\r\nhello"],
    ],
)
async def test_a_reply_and_its_connection_are_used_again(script: list[bytes], open_to: Callable[[str], Connections]):
    async with answering(script) as server:
        pool = open_to(server.url)
        assert [await ask(pool) for _ in range(3)] == [b"hello"] * 3
        assert server.opened == 1
    host = server.url.removeprefix("http://").encode()
    expected = b"POST /v1/generate HTTP/1.1\r\nhost: %b\r\nauthorization: Bearer k\r\nx-call: c1\r\ncontent-length: 2"
    assert server.requests[0] == expected % host + b"\r\n\r\n{}"


async def test_a_body_that_the_connection_ends(open_to: Callable[[str], Connections]):
    async with answering([OK + b"\r\nall of it"], close_after=True) as server:
        pool = open_to(server.url)
        assert [await ask(pool), await ask(pool)] == [b"all of it"] * 2
        assert server.opened == 2


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([OK + b"content-length: 50\r\n\r\nhello"], "the server closed the connection"),
        ([OK + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n"], "the server closed the connection"),
        ([b"HTTP/1.1 200"], "the server closed the connection"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP/1.1"),
        ([OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n"], "not HTTP/1.1"),
        ([OK, *[b"x-filler: " + b"y" * 8000 + b"\r\n"] * 12], "head has over 65536 bytes"),
    ],
)
async def test_a_reply_that_breaks_off_is_none(script: list[bytes], reason: str, open_to: Callable[[str], Connections]):
    async with answering(script, close_after=True) as server:
        with pytest.raises(ConnectionBroken, match=reason):
            await ask(open_to(server.url))


async def test_two_answers_to_one_request_end_the_connection(open_to: Callable[[str], Connections]):
    answer = OK + b"content-length: 5\r\n\r\nhello"
    async with answering([answer + OK + b"content-length: 5\r\n\r\nother"], [answer]) as server:
        pool = open_to(server.url)
        assert [await ask(pool), await ask(pool)] == [b"hello", b"hello"]
        assert server.opened == 2


async def test_what_comes_unasked_is_no_answer_to_the_next_request(open_to: Callable[[str], Connections]):
    answer = OK + b"content-length: 5\r\n\r\n"
    async with answering([answer + b"hello", b"HTTP/1.1 408 late\r\ncontent-length: 0\r\n\r\n"]) as server:
        pool = open_to(server.url)
        assert await ask(pool) == b"hello"
        await server.closed.wait()
        assert await ask(pool) == b"hello"
        assert server.opened == 2


async def test_a_get_is_sent_again_where_a_kept_connection_was_closed(open_to: Callable[[str], Connections]):
    """A server that read a POST may have acted on it."""
    async with answering([OK + b"content-length: 5\r\n\r\nhello"], []) as server:
        pool = open_to(server.url)
        await ask(pool)
        server.close_after = True
        with pytest.raises(ConnectionBroken, match="the server closed the connection"):
            await ask(pool)
        server.close_after = False
        await ask(pool)
        server.close_after = True
        assert await ask(pool, "GET", "/v1/models", b"") == b"hello"


async def test_a_request_that_is_given_up_closes_its_connection(open_to: Callable[[str], Connections]):
    async with answering([OK + b"content-length: 50\r\n\r\nhello"]) as server:
        pool = open_to(server.url)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ask(pool)
        await asyncio.wait_for(server.closed.wait(), 20)


async def test_a_reader_that_is_behind_holds_the_server_back(open_to: Callable[[str], Connections]):
    size = 64 << 20
    async with answering([OK + b"content-length: %d\r\n\r\n" % size, b"x" * size]) as server:
        response = await open_to(server.url).request("POST", "/", b"", {})
        await asyncio.sleep(0.3)
        first = await response.read_some()
        assert 0 < len(first) < 8 << 20
        assert len(first) + len(await response.read()) == size
        response.release()


async def test_no_server_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConnectionBroken, match="can't connect"):
        await ask(Connections("http://127.0.0.1:1", {}))
    monkeypatch.setattr(connections, "CONNECT_S", 0.01)
    with pytest.raises(ConnectionBroken, match=r"no connection within 0\.01 s|can't connect"):
        await ask(Connections("http://192.0.2.1:81", {}))


async def test_all_idle_connections_are_closed(open_to: Callable[[str], Connections]):
    async with answering([OK + b"content-length: 5\r\n\r\nhello"]) as server:
        pool = open_to(server.url)
        await asyncio.gather(*[ask(pool) for _ in range(5)])
        assert server.opened == 5
        pool.close()
        await asyncio.wait_for(asyncio.gather(*server.tasks), 20)


async def test_connections_unused_for_long_are_not_used_again(
    open_to: Callable[[str], Connections], monkeypatch: pytest.MonkeyPatch
):
    async with answering([OK + b"content-length: 5\r\n\r\nhello"]) as server:
        pool = open_to(server.url)
        await ask(pool)
        monkeypatch.setattr(connections, "IDLE_S", -1.0)
        await ask(pool)
        assert server.opened == 2


def test_no_header_brings_another_one():
    with pytest.raises(ValueError, match="a header holds a line break"):
        Connections("http://127.0.0.1", {"authorization": "Bearer k\r\nx-other: 1"})


async def test_a_machine_that_acknowledges_nothing_is_given_up_soon() -> None:
    """What a firewall that drops packets looks like can't be made here; that the kernel is told can be seen."""
    with socket.socket() as connected:
        notice_death(connected)
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == DEAD_AFTER_S * 1000


async def test_after_a_silent_connection_no_idle_one_is_trusted() -> None:
    script = [OK + b"content-length: 2\r\n\r\n{}"]
    async with answering(script) as server, relayed("127.0.0.1", int(server.url.rpartition(":")[2])) as relay:
        engine = EngineHttp("main", EngineSettings(url=f"http://127.0.0.1:{relay.own_port}"))
        await asyncio.gather(*(engine.json("GET", "/v1/models") for _ in range(4)))
        relay.vanish()
        with pytest.raises(EngineTimeout):
            await engine.json("GET", "/v1/models", timeout_s=0.2)
        assert await engine.json("GET", "/v1/models", timeout_s=5) == {}
        await engine.close()
