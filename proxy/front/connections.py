"""Limits on the connections of all planes: their number, their deadlines, and the size of a request's head.

This is uvicorn's protocol with limits. A head (request line and headers) has at most `HEAD_BYTES` bytes and `HEADERS`
headers. What is neither head nor body (chunks' sizes and extensions, trailers, blank lines) counts as framing, which is
limited by the bytes of the body. Trailers are refused, and every transfer coding but `chunked`, alone and in HTTP/1.1.
The chunks of a body are handed on together, as they were read: many small ones cost little more than a large one. A
request must arrive within a deadline. A plane has a maximum number of connections, and of connections with the same key
(valid or not) in their last head; a connection has one of requests that wait for others' replies. One sweep a second
closes late connections, so a request needs no timer. What is refused here never reaches the application.

A connection is a stranger until one of its requests has a valid key (`admit`). An idle stranger is closed after
`STRANGER_S`. If its plane is full and a new connection arrives, the stranger that is idle longest is closed at once. So
nobody can fill a plane without a key.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rolltap.proxy.front.exposure import Hosts

HEAD_BYTES = 64 << 10
HEADERS = 128
FRAMING_PER_BYTE = 8
"""Bytes of framing for each byte of a body, beside `HEAD_BYTES`. A chunk of one byte has five."""
PIPELINED = 32
"""Requests of a connection that may wait for replies to earlier ones. One takes fifty times the bytes that it has."""
SWEEP_S = 1.0
STRANGER_S = 5.0
"""Seconds that a stranger may be idle, before its first request or between requests."""
ADMIT = "admit"
"""Key in the state of an ASGI scope: the function that `admit` calls."""
PARTS = "parts"
"""The same of the response's `ReplyParts`."""
H2C = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
"""The offer of HTTP/2 that Java's client makes in each request. httptools takes the body for the other protocol's."""
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`receipt_s`: seconds for a request's head, from the connection's start or the head's first byte, and again for
    its body. `hosts`: the allowed hosts; None: all. `per_key`: connections with one key; None: no limit."""

    connections: int
    receipt_s: float
    hosts: Hosts | None = None
    per_key: int | None = None


class _Refused(Exception):
    """Raised in the parser's callbacks to end a request. The answer is in `LimitedProtocol.refusal`."""


class ReplyParts:
    """Writes parts of one response's body past ASGI's `send`, whose coroutine and message cost more than the write."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def open(self) -> bool:
        """Whether a part can be written now: the body has begun, in chunks, and the client is not far behind."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Writes a part that is not empty; only while `open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A subclass for each plane sets `limits` (`limited`)."""

    limits: ConnectionLimits
    by_key: Counter[int]
    """The number of the plane's connections, by the hash of each key in their last head."""
    strangers: dict[LimitedProtocol, float]
    """The plane's idle strangers and the time since when they are idle, longest first."""
    keys: frozenset[int] = frozenset()
    admitted = False
    chunks: list[bytes]
    """Of the body, since it was last handed on."""
    refusal: tuple[int, str] | None = None
    head_bytes = 0
    body_bytes = 0
    messages = 0  # requests that began
    framing_bytes = 0
    """Of the current request: all that came after its head and is not body."""
    idle_framing_bytes = 0
    """The part of it that came since the last byte of the body."""
    late_at = math.inf
    """Loop time when this connection is late; infinite while it waits for our reply or is idle between requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.chunks = []
        self.late_at = self.loop.time() + self.limits.receipt_s
        if len(self.connections) > self.limits.connections and not self._evict():
            self.refusal = (503, "too many connections")
            self.send_400_response("")
        self.strangers[self] = self.loop.time()

    def _evict(self) -> bool:
        """Closes the stranger that is idle longest; False if there is none."""
        for stranger in self.strangers:
            del self.strangers[stranger]
            self.connections.discard(stranger)  # it is gone a moment later
            stranger.transport.abort()
            return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.strangers.pop(self, None)
        self._count_keys(frozenset())

    def admit(self) -> None:
        """Marks the connection as no stranger: one of its requests had a valid key."""
        self.admitted = True
        self.strangers.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if (self.head_bytes >= 0 or self.late_at == math.inf) and H2C.search(data):  # `data` begins in no body
            head, end, rest = data.partition(b"\r\n\r\n")
            data = H2C.sub(b"", head + end) + rest
        within_head, body_bytes, messages = self.head_bytes >= 0, self.body_bytes, self.messages
        super().data_received(data)
        self._hand_on()
        if self.head_bytes < 0:
            if not within_head and self.messages == messages:  # else a request began in this piece
                self._count_framing(len(data), self.body_bytes - body_bytes)
            if self.late_at == math.inf and self.cycle.response_complete:  # blank lines between requests
                self.late_at = self.loop.time() + self.limits.receipt_s
        elif within_head:
            self.head_bytes += len(data)
            if self.head_bytes > HEAD_BYTES:
                self.refusal = (431, "the request's head is too large")
                self.send_400_response("")

    def _count_framing(self, received: int, body: int) -> None:
        framing = received - body
        self.framing_bytes += framing
        self.idle_framing_bytes = 0 if body else self.idle_framing_bytes + framing
        allowed = HEAD_BYTES + FRAMING_PER_BYTE * self.body_bytes
        if self.framing_bytes > allowed or self.idle_framing_bytes > HEAD_BYTES:
            self.refusal = (400, "the body's chunks have more framing than content")
            self.send_400_response("")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_bytes < 0:
            self._refuse(400, "trailers are not taken")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)

    def _hand_on(self) -> None:
        """Hands the chunks of a body on in one piece: what follows costs more for each than the parser does."""
        if self.chunks:
            body = b"".join(self.chunks)
            self.chunks.clear()
            self.body_bytes += len(body)
            super().on_body(body)

    def on_message_begin(self) -> None:
        self.head_bytes = self.body_bytes = self.framing_bytes = self.idle_framing_bytes = 0
        self.messages += 1
        self.late_at = self.loop.time() + self.limits.receipt_s
        super().on_message_begin()
        if not self.admitted:
            self.scope.setdefault("state", {})[ADMIT] = self.admit

    def on_headers_complete(self) -> None:
        self.head_bytes = -1  # the rest is body
        self.strangers.pop(self, None)
        self.late_at = self.loop.time() + self.limits.receipt_s
        if len(self.pipeline) >= PIPELINED:
            self.transport.abort()  # a refusal would be taken for the reply to an earlier request
            raise _Refused
        if len(self.headers) > HEADERS:
            self._refuse(431, f"a request has at most {HEADERS} headers")
        if codings := [value for name, value in self.headers if name == b"transfer-encoding"]:
            assert self.parser is not None  # it calls this
            if self.parser.get_http_version() != "1.1":  # who reads it by the standard finds no body there
                self._refuse(400, "HTTP/1.0 has no transfer codings")
            if len(codings) > 1 or codings[0].strip().lower() != b"chunked":
                self._refuse(501, "the only transfer coding that is taken is chunked")
        if self.limits.hosts is not None and (problem := self.limits.hosts.refusal(self.headers)):
            self._refuse(403, problem)
        sent = {line for line in self.headers if line[0] in KEY_HEADERS}
        if len(sent) > 1 and len(sent) > len({name for name, _ in sent}):  # readers differ in which of them counts
            self._refuse(400, "a header of the request has two keys: send one")
        keys = presented_keys(self.headers, self.url)
        if keys != self.keys:
            self._count_keys(keys)
            if self.limits.per_key is not None and any(self.by_key[key] > self.limits.per_key for key in keys):
                self._refuse(429, "too many connections with this key")
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # no upgrade was asked for
            self.scope.setdefault("state", {})[PARTS] = ReplyParts(self.cycle)

    def on_message_complete(self) -> None:
        self._hand_on()
        self.late_at = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.admitted and not self.transport.is_closing():
            self.strangers[self] = self.loop.time()

    def _count_keys(self, keys: frozenset[int]) -> None:
        self.by_key.subtract(self.keys)
        for key in self.keys:
            if not self.by_key[key]:
                del self.by_key[key]
        self.by_key.update(keys)
        self.keys = keys

    def _refuse(self, status: int, problem: str) -> None:
        self.refusal = (status, problem)
        raise _Refused

    def send_400_response(self, msg: str) -> None:
        status, text = self.refusal or (400, msg)
        if self.transport.is_closing():
            return
        body = text.encode("ascii", "replace")
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def close_if_late(self, now: float) -> None:
        """Closes a connection whose request is late. A connection that we do not read, as we are busy, is not late."""
        if self.head_bytes <= 0 and now >= self.strangers.get(self, math.inf) + STRANGER_S:
            self.transport.close()
            return
        if now < self.late_at or self.flow.read_paused or self.transport.is_closing():
            return
        self.late_at = math.inf
        if self.cycle is None or self.cycle.response_complete:
            self.refusal = (408, "the request did not arrive in time")
            self.send_400_response("")
        else:
            self.transport.abort()


def limited(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """A protocol class for one plane."""
    return type("PlaneProtocol", (LimitedProtocol,), {"limits": limits, "by_key": Counter(), "strangers": {}})


def admit(scope: Any) -> None:
    """Admits the connection of this ASGI scope: its request had a valid key."""
    if (admitted := scope.get("state", {}).get(ADMIT)) is not None:
        admitted()


def reply_parts(scope: Any) -> ReplyParts | None:
    """The writer of parts of the response in this ASGI scope; None where another server serves it."""
    return scope.get("state", {}).get(PARTS)


def presented_keys(headers: Sequence[tuple[bytes, bytes]], url: bytes) -> frozenset[int]:
    """The hash of every key in a head. All count, whichever of them the request's protocol uses."""
    keys = [value.split()[-1:] for name, value in headers if name in KEY_HEADERS]
    if b"?" in url:
        query = url.partition(b"?")[2].decode("latin-1")
        keys += [[value.encode()] for name, value in parse_qsl(query) if name == "key"]
    return frozenset(hash(key) for last in keys for key in last)


async def sweep(servers: Sequence[uvicorn.Server]) -> None:
    """Closes late connections once a second, forever."""
    now = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(SWEEP_S)
        for server in servers:
            connections: list[Any] = list(server.server_state.connections)
            for connection in connections:
                connection.close_if_late(now())
