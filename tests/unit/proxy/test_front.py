"""The front of all planes: what it takes from whom, for how long, before there is a request."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rolltap.contract.base import MAX_BODY
from rolltap.contract.keys import Caller, MintKey
from rolltap.contract.planes import MANY_ANNOTATIONS
from rolltap.errors import ConfigError
from rolltap.ledger.views import tampering_counts
from rolltap.proxy.app import Rolltap
from rolltap.proxy.front import connections
from rolltap.proxy.front.exposure import Hosts, check_exposure
from rolltap.proxy.server import Front, bind, serve
from rolltap.settings import ListenSettings, Settings

PLANES = ("agent", "trainer", "admin")
ROUTES = {"agent": "/v1/chat/completions", "trainer": "/leases", "admin": "/rewards"}
every_plane = pytest.mark.parametrize("plane", PLANES)


class Served:
    """The proxy's three planes on ports of their own."""

    def __init__(self, app: Rolltap, ports: dict[str, int]) -> None:
        self.app, self.ports = app, ports

    async def open(self, plane: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.ports[plane])

    async def exchange(self, plane: str, head: str, body: bytes = b"", *, whole: bool = True) -> tuple[int, bytes]:
        """The status of the answer to these very bytes, and the answer. 0: the connection ended without one."""
        reader, writer = await self.open(plane)
        writer.write(head.replace("\n", "\r\n").encode() + body)
        with suppress(ConnectionError):
            await writer.drain()
        answer = b""
        with suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(100_000), 20)
            while whole and (more := await asyncio.wait_for(reader.read(100_000), 20)):
                answer += more
        writer.close()
        return int(answer.split(b" ", 2)[1]) if answer else 0, answer


@asynccontextmanager
async def served(folder: Path, **limits: Any) -> AsyncIterator[Served]:
    settings = Settings.model_validate(
        {
            "data": folder,
            "limits": {"receipt_s": 0.3, "body_mb": 0.5, **limits},
            "engines": {"up": {"kind": "openai_compatible", "url": "http://127.0.0.1:9"}},
            "policies": {"p": {"engine": "up"}},
        }
    )
    async with Rolltap.running(settings) as app:
        sockets, stop = {plane: bind("127.0.0.1", 0) for plane in PLANES}, asyncio.Event()
        planes = {plane: (app.planes[plane], sockets[plane]) for plane in PLANES}
        serving = asyncio.create_task(serve(planes, stop, Front(settings.limits, settings.listen)))
        try:
            yield Served(app, {plane: each.getsockname()[1] for plane, each in sockets.items()})
        finally:
            stop.set()
            await serving


@pytest.fixture(autouse=True)
def sweeps_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


def head(plane: str, *more: str, host: str = "127.0.0.1", method: str = "POST") -> str:
    return "\n".join([f"{method} {ROUTES[plane]} HTTP/1.1", f"Host: {host}", *more, "", ""])


@every_plane
async def test_a_body_is_not_taken_from_who_has_no_key(tmp_path: Path, plane: str) -> None:
    """The answer comes although the body never does."""
    keys = ([], ["Authorization: Bearer rt-junk"], ["Authorization: Basic YTpi"])
    lengths = ("Content-Length: 300000000", "Transfer-Encoding: chunked")
    async with served(tmp_path, receipt_s=30) as there:
        for key, length in itertools.product(keys, lengths):
            reader, writer = await there.open(plane)
            writer.write(head(plane, *key, length).replace("\n", "\r\n").encode())
            assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] == b"401"
            writer.close()


async def test_a_body_is_not_taken_from_a_key_that_no_route_of_the_plane_takes(tmp_path: Path) -> None:
    """Agents may have a project's key: what they send to the planes of others must cost nothing."""
    async with served(tmp_path, receipt_s=30) as there:
        keys = there.app.settings.keys
        for plane, key in (("admin", keys.project), ("admin", keys.trainer), ("trainer", keys.project)):
            reader, writer = await there.open(plane)
            request = head(plane, f"Authorization: Bearer {key}", "Content-Length: 400000")
            writer.write(request.replace("\n", "\r\n").encode())
            assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] == b"403"
            writer.close()
        entries = await there.app.ledger.audit.newest(limit=3)
        assert [entry.key_id for entry in entries] == ["project", "trainer", "project"]


CHUNKED = "Transfer-Encoding: chunked"
FRAMING = {
    "trailers": (b"0\r\n", b"x: y\r\n" * 8_000),
    "a long trailer": (b"0\r\nx: ", b"y" * 65_536),
    "a long extension": (b"1;", b"x" * 65_536),
    "extensions": (b"", b"1;" + b"x" * 4_000 + b"\r\ny\r\n"),
    "a long size": (b"", b"0" * 65_536),
    "blank lines": (b"0\r\n\r\n", b"\r\n" * 32_768),
}


@pytest.mark.parametrize("kind", FRAMING)
async def test_what_is_neither_head_nor_body_has_a_limit(tmp_path: Path, kind: str) -> None:
    """A stranger sends it as long as it is taken: less than 2 MB, whatever a body may have."""
    first, more = FRAMING[kind]
    async with served(tmp_path, receipt_s=30, body_mb=50) as there:
        _, writer = await there.open("agent")
        writer.write(head("agent", CHUNKED).replace("\n", "\r\n").encode() + first)
        sent = 0
        with suppress(ConnectionError):
            while sent < 40_000_000 and not writer.transport.is_closing():
                writer.write(more)
                await asyncio.wait_for(writer.drain(), 20)
                sent += len(more)
                await asyncio.sleep(0)
        assert sent < 8_000_000  # most of it lies in the buffers of the sockets
        writer.close()


async def test_small_chunks_are_a_body_like_any_other(tmp_path: Path) -> None:
    async with served(tmp_path) as there:
        _, key = await there.app.services.sessions.open()
        body = (
            b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"model": "none", "x": "' + b"y" * 5000 + b'"}') + b"0\r\n\r\n"
        )
        request = head("agent", f"Authorization: Bearer {key}", CHUNKED, "Connection: close")
        status, answer = await there.exchange("agent", request, body)
        assert status in (400, 404), answer
        assert b"framing" not in answer


@pytest.mark.parametrize("size", [1, 2, 7, 60])
async def test_many_small_chunks_are_handed_on_together(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each by itself the work took seconds, in which no other call went on."""
    handed_on: list[int] = []
    take = HttpToolsProtocol.on_body
    monkeypatch.setattr(
        HttpToolsProtocol, "on_body", lambda self, body: (handed_on.append(len(body)), take(self, body))
    )
    async with served(tmp_path, receipt_s=30) as there:
        _, key = await there.app.services.sessions.open()
        text = b'{"model": "none", "x": "' + b"y" * 300_000 + b'"}'
        chunks = (text[at : at + size] for at in range(0, len(text), size))
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        request = head("agent", f"Authorization: Bearer {key}", CHUNKED, "Connection: close")
        status, answer = await there.exchange("agent", request, body)
        assert status in (400, 404), answer
        assert sum(handed_on) == len(text)
        assert len(handed_on) < 300


OPEN_TO_ALL = [("POST", "/none"), ("GET", "/health"), ("PUT", "/v1/chat/completions"), ("POST", "/api/show")]


@pytest.mark.parametrize("length", ["Content-Length: 3000000000", CHUNKED])
@pytest.mark.parametrize(("method", "path"), OPEN_TO_ALL)
async def test_a_body_that_nobody_reads_is_not_taken(tmp_path: Path, method: str, path: str, length: str) -> None:
    """Where no key is asked for, it would be read and thrown away for as long as a body may take."""
    async with served(tmp_path, receipt_s=30) as there:
        reader, writer = await there.open("agent")
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{length}\r\n\r\n".encode())
        sent, piece = 0, b"10000\r\n" + b"x" * 0x10000 + b"\r\n" if length == CHUNKED else b"x" * 0x10000
        with suppress(ConnectionError):
            while sent < 80_000_000 and not writer.transport.is_closing():
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 20)
                sent += len(piece)
                await asyncio.sleep(0)
        assert sent < 20_000_000  # most of it lies in the buffers of the sockets
        with suppress(ConnectionError):
            assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] in (b"200", b"404", b"405")
        writer.close()


@pytest.mark.parametrize(("method", "path"), OPEN_TO_ALL)
async def test_a_short_body_that_nobody_reads_ends_no_connection(tmp_path: Path, method: str, path: str) -> None:
    async with served(tmp_path, receipt_s=30) as there:
        connection = await there.open("agent")
        for _ in range(3):
            connection[1].write(
                f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{{}}".encode()
            )
            answer = await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), 20)
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await connection[0].readexactly(int(length.partition(b":")[2]))
        connection[1].close()


async def test_a_small_request_follows_a_large_one_on_the_same_connection(tmp_path: Path) -> None:
    """A history of megabytes, then a request for a title: each is counted by itself, however it is cut into pieces."""
    async with served(tmp_path) as there:
        _, key = await there.app.services.sessions.open()
        reader, writer = await there.open("agent")
        for size in (400_000, 10, 400_000, 1, 200_000, 0):
            body = b'{"model": "none", "x": "' + b"y" * size + b'"}'
            request = head("agent", f"Authorization: Bearer {key}", f"Content-Length: {len(body)}")
            writer.write(request.replace("\n", "\r\n").encode() + body)
            status = (await asyncio.wait_for(reader.readline(), 20)).split()[1]
            lines = [line async for line in header_lines(reader)]
            length = next(int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:"))
            answer = await reader.readexactly(length)
            assert (status, b'"invalid_request"' in answer) == (b"400", True), answer
        writer.close()


@every_plane
async def test_who_sends_many_requests_before_their_replies_is_cut(tmp_path: Path, plane: str) -> None:
    """Without a key: each waiting request takes much more memory than it takes to send it."""
    request = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    last = request.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
    async with served(tmp_path, receipt_s=30) as there:
        for pieces, each, is_cut in ((1, connections.PIPELINED, False), (8, 256, True)):
            reader, writer = await there.open(plane)
            answer = b""
            with suppress(ConnectionError):
                for _ in range(pieces):  # each of which has fewer bytes than a head may have
                    writer.write((request * each).encode())
                    answer += await asyncio.wait_for(reader.read(1), 20)
                writer.write(last.encode())
                while part := await asyncio.wait_for(reader.read(100_000), 20):
                    answer += part
            assert (answer.count(b"HTTP/1.1 200") <= pieces * each) is is_cut
            writer.close()


async def header_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while (line := await asyncio.wait_for(reader.readline(), 20)).strip():
        yield line


@every_plane
async def test_a_body_over_the_cap_is_refused_before_it_comes(tmp_path: Path, plane: str) -> None:
    async with served(tmp_path, receipt_s=30) as there:
        _, key = await there.app.services.sessions.open()
        keys = there.app.settings.keys.model_dump() | {"agent": key}
        size = (500_000 if plane == "agent" else MAX_BODY) + 1
        for length in (f"Content-Length: {size}", "Transfer-Encoding: chunked"):
            body = b"" if "Content" in length else b"%x\r\n" % size + b"x" * size + b"\r\n"
            request = head(plane, f"Authorization: Bearer {keys[plane]}", length)
            assert (await there.exchange(plane, request, body))[0] == 413


async def test_who_sends_too_much_to_a_plane_reads_what_to_do(tmp_path: Path) -> None:
    """Numbers of each token of one call may be more."""
    async with served(tmp_path, receipt_s=30) as there:
        keys = there.app.settings.keys
        request = head("admin", f"Authorization: Bearer {keys.admin}", f"Content-Length: {MAX_BODY + 1}")
        status, answer = await there.exchange("admin", request)
        assert (status, b"in parts (`first`, `total`)" in answer) == (413, True)
        for size, expected in ((MAX_BODY + 1, 400), (MANY_ANNOTATIONS + 1, 413)):
            lines = f"Authorization: Bearer {keys.trainer}", f"Content-Length: {size}", "Connection: close"
            request = head("trainer", *lines).replace("/leases", "/leases/none/annotations")
            body = b" " * size if expected == 400 else b""
            assert (await there.exchange("trainer", request, body))[0] == expected


@every_plane
async def test_a_client_that_has_sent_much_more_meanwhile_reads_why_it_is_refused(tmp_path: Path, plane: str) -> None:
    """It reads nothing before it has written all: a connection that is closed with bytes unread would be reset."""
    async with served(tmp_path, receipt_s=30) as there:
        _, key = await there.app.services.sessions.open()
        keys = there.app.settings.keys.model_dump() | {"agent": key}
        request = head(plane, f"Authorization: Bearer {keys[plane]}", "Transfer-Encoding: chunked")
        chunk = b"80000\r\n" + b"x" * 0x80000 + b"\r\n"

        def answer() -> bytes:
            with socket.create_connection(("127.0.0.1", there.ports[plane]), 10) as connection:
                connection.sendall(request.replace("\n", "\r\n").encode() + chunk * 40)
                return connection.recv(1000)

        assert (await asyncio.to_thread(answer)).startswith(b"HTTP/1.1 413 ")


async def test_who_has_sent_too_much_sends_no_more_long_bodies(tmp_path: Path) -> None:
    """Bodies that are refused count; a budget's polite answers have their bodies, then none is taken."""
    async with served(tmp_path, session_mb=0.1, receipt_s=30) as there:
        _, key = await there.app.services.sessions.open()
        request = head("agent", f"Authorization: Bearer {key}", "Content-Length: 450000", "Connection: close")
        statuses = [(await there.exchange("agent", request, b"x" * 450_000))[0] for _ in range(4)]
        assert statuses == [400] * 4
        status, answer = await there.exchange("agent", request)
        assert (status, b"budget used: this session has 0.1 MB of requests" in answer) == (409, True)


@pytest.mark.parametrize("minted", [False, True])
async def test_a_projects_body_over_the_cap_is_refused(tmp_path: Path, minted: bool) -> None:
    async with served(tmp_path, receipt_s=30) as there:
        key = there.app.settings.keys.project
        if minted:
            by = Caller("admin", "admin")
            key = (await there.app.ledger.keys.mint(MintKey("project", "k"), by)).key
        request = head("agent", f"Authorization: Bearer {key}", "Content-Length: 500001")
        assert (await there.exchange("agent", request))[0] == 413


@every_plane
async def test_a_refusal_is_read_by_who_sends_a_body_on(tmp_path: Path, plane: str) -> None:
    async with served(tmp_path) as there:
        status, answer = await there.exchange(plane, head(plane, "Content-Length: 400000"), b"x" * 400_000)
    assert status == 401
    assert b"connection: close" in answer
    assert "key" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].lower()


@every_plane
async def test_a_slow_head_a_slow_body_and_silence_end(tmp_path: Path, plane: str) -> None:
    async with served(tmp_path) as there:
        _, key = await there.app.services.sessions.open()
        key = {**there.app.settings.keys.model_dump(), "agent": key}[plane]
        starts = {
            "nothing": b"",
            "a head": f"POST {ROUTES[plane]} HTTP/1.1\r\nHost: 127.".encode(),
            "blank lines": b"\r\n\r\n",
            "a body": head(plane, f"Authorization: Bearer {key}", "Content-Length: 90000")
            .replace("\n", "\r\n")
            .encode(),
        }

        async def ends(start: bytes, dripped: bytes) -> bytes:
            reader, writer = await there.open(plane)
            writer.write(start)
            answer = asyncio.create_task(reader.read())
            with suppress(ConnectionError):
                while not answer.done():
                    await writer.drain()
                    writer.write(dripped)
                    await asyncio.wait([answer], timeout=0.05)
            writer.close()
            with suppress(ConnectionError):
                return await answer
            return b""

        async with asyncio.timeout(20):
            answers = await asyncio.gather(
                *(
                    ends(start, b"" if name == "nothing" else b"\r\n" if name == "blank lines" else b"x")
                    for name, start in starts.items()
                )
            )
    assert all(answer == b"" or b" 408 " in answer for answer in answers), answers


@every_plane
async def test_a_head_has_a_largest_size_and_number_of_lines(tmp_path: Path, plane: str) -> None:
    async with served(tmp_path) as there:
        endless = f"GET / HTTP/1.1\nHost: 127.0.0.1\nx: {'a' * 1_000_000}"
        assert (await there.exchange(plane, endless))[0] in (0, 431)
        lines = [f"x-{number}: 1" for number in range(connections.HEADERS)]
        assert (await there.exchange(plane, head(plane, *lines, method="GET")))[0] == 431


KEYED = {"agent": "/v1/models", "trainer": "/policies/p", "admin": "/policies"}


async def keyed(there: Served, plane: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that rests after a request with a known key."""
    keys = {**there.app.settings.keys.model_dump(), "agent": (await there.app.services.sessions.open())[1]}
    connection = await there.open(plane)
    await ask(connection, f"GET {KEYED[plane]}", 200, f"Authorization: Bearer {keys[plane]}")
    return connection


async def ask(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], line: str, status: int, *more: str
) -> None:
    """Sends a request without a body and reads its whole answer."""
    reader, writer = connection
    writer.write("\r\n".join([f"{line} HTTP/1.1", "Host: 127.0.0.1", *more, "", ""]).encode())
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    assert int(answer.split(b" ", 2)[1]) == status, answer
    length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(length.partition(b":")[2]))


@every_plane
async def test_connections_beyond_the_limit_are_refused(tmp_path: Path, plane: str) -> None:
    async with served(tmp_path, connections=3, receipt_s=30) as there:
        held = [await keyed(there, plane) for _ in range(3)]
        assert (await there.exchange(plane, head(plane, method="GET")))[0] == 503
        held[0][1].close()
        async with asyncio.timeout(20):
            while (await there.exchange(plane, head(plane, "Connection: close", method="GET")))[0] == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for _, writer in held[1:]:
            writer.close()


@every_plane
async def test_who_has_no_key_fills_no_plane(tmp_path: Path, plane: str) -> None:
    """Neither by silence, nor by half a head, nor by resting after answers: the longest resting one makes room."""
    async with served(tmp_path, connections=4, receipt_s=30) as there:
        own = await keyed(there, plane)
        strangers = [await there.open(plane) for _ in range(3)]
        strangers[1][1].write(b"GET /none HT")
        await ask(strangers[2], "GET /none", 404, "Authorization: Bearer rt-junk")
        others = [await keyed(there, plane) for _ in range(3)]
        for reader, _ in strangers:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
        for connection in (own, *others):
            await ask(connection, "GET /none", 404)
            connection[1].close()
        for _, writer in strangers:
            writer.close()


@every_plane
async def test_a_stranger_rests_a_short_time(tmp_path: Path, plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", 0.2)
    async with served(tmp_path, receipt_s=30) as there:
        own, silent, refused = await keyed(there, plane), await there.open(plane), await there.open(plane)
        await ask(refused, f"GET {KEYED[plane]}", 401, "Authorization: Bearer rt-junk")
        for reader, writer in (silent, refused):
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        await ask(own, "GET /none", 404)
        own[1].close()


SENT = [
    ("Authorization: Bearer rt-k", "", True),
    ("authorization:   bearer   rt-k ", "", True),
    ("x-api-key: rt-k", "", True),
    ("x-goog-api-key: rt-k", "", True),
    ("x-api-key: junk\nAuthorization: Bearer rt-k", "", True),
    ("x: y", "?%6bey=rt-k", True),
    ("x: y", "?alt=%ff&key=rt-k", True),
    ("x: y", "", False),
    ("Authorization: Bearer rt-other", "", False),
]


async def test_connections_are_counted_per_key(tmp_path: Path) -> None:
    """Wherever a head puts the key. Another key's connection gets in, and one that goes makes room."""
    async with served(tmp_path, connections_per_key=2, receipt_s=30) as there:

        async def rests(*lines: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await there.open("agent")
            await ask(writer, *lines)
            assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] == b"404"
            return reader, writer

        async def ask(writer: asyncio.StreamWriter, *lines: str) -> None:
            writer.write("\r\n".join(["GET /none HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode())
            await writer.drain()

        held = [await rests("Authorization: Bearer rt-k"), await rests("x-api-key: rt-k")]
        for lines, query, same in SENT:
            request = f"GET /none{query} HTTP/1.1\nHost: 127.0.0.1\n{lines}\nConnection: close\n\n"
            assert (await there.exchange("agent", request))[0] == (429 if same else 404), (lines, query)
        await ask(held[0][1], "x-api-key: rt-other")  # it comes with another key from now on
        async with asyncio.timeout(20):
            while b"HTTP/1.1 404" not in await held[0][0].readline():
                pass
        request = "GET /none HTTP/1.1\nHost: 127.0.0.1\nx-api-key: rt-k\nConnection: close\n\n"
        assert (await there.exchange("agent", request))[0] == 404
        for _, writer in held:
            writer.close()


@every_plane
@pytest.mark.parametrize("name", ["Authorization", "x-api-key", "X-Goog-Api-Key"])
async def test_a_header_names_one_key(tmp_path: Path, plane: str, name: str) -> None:
    """Else a balancer before us and we, or two places of ours, take the request for two users'. The same key twice,
    and keys in two headers, as some clients send it, are no doubt."""
    async with served(tmp_path) as there:

        async def answer(*lines: str) -> int:
            request = "\n".join(["GET /health HTTP/1.1", "Host: 127.0.0.1", *lines, "Connection: close", "", ""])
            return (await there.exchange(plane, request))[0]

        assert await answer(f"{name}: Bearer rt-a", f"{name.lower()}: Bearer rt-b") == 400
        assert await answer(f"{name}: rt-b", "x-other: 1", f"{name}: Bearer rt-b") == 400
        assert await answer(f"{name}: Bearer rt-a", f"{name}: Bearer rt-a") == 200
        assert await answer("Authorization: Bearer rt-a", "x-api-key: rt-a", "x-goog-api-key: rt-b") == 200


@pytest.mark.parametrize("line", ["Authorization: Bearer {}", "x-api-key: {}", "x-goog-api-key: {}"])
@pytest.mark.parametrize("plane", ["trainer", "admin"])
async def test_a_sessions_key_on_another_plane_is_counted(tmp_path: Path, plane: str, line: str) -> None:
    """In whichever header the agent's own dialect sends it."""
    async with served(tmp_path) as there:
        session, key = await there.app.services.sessions.open()
        lines = f"Host: 127.0.0.1\n{line.format(key)}\nConnection: close\n\n"
        assert (await there.exchange(plane, f"GET {KEYED[plane]} HTTP/1.1\n{lines}"))[0] == 401
        database = there.app.services.call_log.database
        counts = await database.query(lambda connection: tampering_counts(connection, [session.id]))
        assert counts == {session.id: 1}


FOREIGN = [
    ["Host: evil.example"],
    ["Host: 127.0.0.1.evil.example:80"],
    ["Host: localhost", "Host: evil.example"],
    ["Host: 127.0.0.1", "Origin: https://evil.example"],
    ["Host: 127.0.0.1", "Origin: null"],
    ["Host: localhost:8712", "Origin: http://localhost:3000"],
    [],
]


@every_plane
async def test_every_plane_says_that_it_lives_to_who_has_no_key(tmp_path: Path, plane: str) -> None:
    async with served(tmp_path) as there:
        status, answer = await there.exchange(plane, "GET /health HTTP/1.1\nHost: 127.0.0.1\n\n")
    assert status == 200
    assert answer.endswith(b'{"status":"ok"}')


@every_plane
async def test_a_web_page_does_not_reach_a_plane_on_loopback(tmp_path: Path, plane: str) -> None:
    async with served(tmp_path) as there:
        for lines in FOREIGN:
            request = "\n".join([f"GET {ROUTES[plane]} HTTP/1.1", *lines, "", ""])
            assert (await there.exchange(plane, request))[0] in (400, 403), lines


@pytest.mark.parametrize(
    ("lines", "allowed"),
    [
        ([(b"host", b"localhost:8710")], True),
        ([(b"host", b"[::1]:8710")], True),
        ([(b"host", b"127.0.0.1:8712"), (b"origin", b"http://127.0.0.1:8712")], True),
        ([(b"host", b"host.docker.internal:8710")], True),
        ([(b"host", b"rolltap.example")], True),
        ([(b"host", b"proxy.example:443")], True),
        ([(b"host", b"user@localhost")], True),
        ([(b"host", b"10.0.0.1")], False),
        ([(b"host", b"[::1")], False),
        ([(b"host", b"")], False),
        ([(b"host", "lôcalhost".encode())], False),
    ],
)
def test_names_of_loopback(lines: list[tuple[bytes, bytes]], allowed: bool) -> None:
    listen = ListenSettings(names=("proxy.example",), public_url="https://rolltap.example/agent")
    hosts = Hosts.of(listen, "127.0.0.1")
    assert hosts is not None
    assert (hosts.refusal(lines) == "") is allowed
    assert Hosts.of(listen, "0.0.0.0") is None


STRONG = {"admin": "rt-admin-0123456789", "trainer": "rt-trainer-0123456789"}


@pytest.mark.parametrize(
    ("listen", "keys", "told"),
    [
        ({"host": "0.0.0.0"}, {}, "needs keys"),
        ({"admin_host": "0.0.0.0"}, {}, "needs keys"),
        ({"host": "127.1"}, {}, "needs keys"),
        ({"host": "0.0.0.0"}, {"admin": "a", "trainer": "b"}, "16"),
        ({"host": "0.0.0.0"}, {**STRONG, "project": "p"}, "keys.project is weak"),
        ({"host": "0.0.0.0"}, {**STRONG, "admin": "a" * 64}, "keys.admin is weak"),
        ({"host": "0.0.0.0"}, {**STRONG, "trainer": STRONG["admin"]}, "are equal"),
    ],
)
def test_away_from_loopback_keys_are_chosen_and_long(listen: Any, keys: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_exposure(Settings.model_validate({"listen": listen, "keys": keys}))


@pytest.mark.parametrize(("more", "warned"), [({}, True), ({"tls_certificate": "cert.pem"}, False)])
def test_keys_in_clear_are_warned_of(caplog: pytest.LogCaptureFixture, more: Any, warned: bool) -> None:
    settings = {"listen": {"admin_host": "0.0.0.0", **more}, "keys": STRONG}
    check_exposure(Settings.model_validate(settings))
    assert ("keys and prompts are sent unencrypted to the admin plane" in caplog.text) is warned


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("offer", ["Upgrade: h2c", "upgrade:h2c ", "UPGRADE: \tH2C"])
async def test_an_offer_of_http_2_costs_no_body(tmp_path: Path, offer: str, apart: bool) -> None:
    """Java's client makes it in each request to a plain URL; a server may pass it over."""
    body = json.dumps({"role": "viewer", "name": "upgrade:h2c"}).encode()
    async with served(tmp_path, receipt_s=10) as there:
        key = f"Authorization: Bearer {there.app.settings.keys.admin}"
        lines = (key, "Content-Type: application/json", f"Content-Length: {len(body)}")
        asked = head("admin", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAM", offer, *lines)
        request = asked.replace(ROUTES["admin"], "/keys").replace("\n", "\r\n").encode()
        reader, writer = await there.open("admin")
        for _ in range(2):
            writer.write(request if apart else request + body)
            if apart:
                await asyncio.sleep(0)
                writer.write(body)
            assert (await asyncio.wait_for(reader.readline(), 20)).split()[1] == b"200"
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            size = int(answer.lower().split(b"content-length:")[1].split()[0])
            assert json.loads(await reader.readexactly(size))["name"] == "upgrade:h2c"
        writer.close()
