"""Connections of all planes, before there is a request: how many, how long, and how large a head may be.

It is uvicorn's protocol with limits: a head has `HEAD_BYTES` and `HEADERS` at most, a request arrives within its
deadline, and a plane has so many connections at once, of which so many have sent the same key, known or not, in their
last head. Before its first head a connection counts for its plane only. One sweep a second looks for late ones, so no
request costs a timer. What is refused here never becomes a request.

A connection is a stranger until one of its requests came with a key that is known (`admit`). A stranger that rests is
closed after `STRANGER_S`, and at once where its plane is full and another connection comes: the longest resting one
first. So nobody fills a plane without a key.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rolltap.proxy.front.hosts import Hosts

HEAD_BYTES = 64 << 10
HEADERS = 128
SWEEP_S = 1.0
STRANGER_S = 5.0
"""How long a connection rests, before its first request and between requests, whose key nobody knows."""
ADMIT = "admit"
"""In the state of an ASGI scope: what `admit` calls."""
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`receipt_s`: a request's head has so long from the connection's start or its own first byte, and so has its body
    from then on. `hosts`: who may call; None: anyone. `per_key`: connections with one key; None: any number."""

    connections: int
    receipt_s: float
    hosts: Hosts | None = None
    per_key: int | None = None


class _Refused(Exception):
    """Raised in the parser's callbacks: the request ends here, with the answer in `LimitedProtocol.refusal`."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A subclass for each plane sets `limits` (`limited`)."""

    limits: ConnectionLimits
    by_key: Counter[int]
    """The plane's connections, by the hash of each key in their last head."""
    strangers: dict[LimitedProtocol, float]
    """The plane's resting connections that brought no known key, the longest resting first; since when."""
    keys: frozenset[int] = frozenset()
    admitted = False
    refusal: tuple[int, str] | None = None
    head_bytes = 0
    late_at = math.inf
    """When this connection is late on the loop's clock; infinite while it waits for us or rests between requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.late_at = self.loop.time() + self.limits.receipt_s
        if len(self.connections) > self.limits.connections and not self._evict():
            self.refusal = (503, "too many connections")
            self.send_400_response("")
        self.strangers[self] = self.loop.time()

    def _evict(self) -> bool:
        """Makes room by closing the stranger that rests longest; False where there is none."""
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
        """A request of this connection came with a known key."""
        self.admitted = True
        self.strangers.pop(self, None)

    def data_received(self, data: bytes) -> None:
        within_head = self.head_bytes >= 0
        super().data_received(data)
        if self.head_bytes < 0:
            if self.late_at == math.inf and self.cycle.response_complete:  # blank lines between requests
                self.late_at = self.loop.time() + self.limits.receipt_s
        elif within_head:
            self.head_bytes += len(data)
            if self.head_bytes > HEAD_BYTES:
                self.refusal = (431, "the request's head is too large")
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self.head_bytes = 0
        self.late_at = self.loop.time() + self.limits.receipt_s
        super().on_message_begin()
        if not self.admitted:
            self.scope.setdefault("state", {})[ADMIT] = self.admit

    def on_headers_complete(self) -> None:
        self.head_bytes = -1  # the rest is body
        self.strangers.pop(self, None)
        self.late_at = self.loop.time() + self.limits.receipt_s
        if len(self.headers) > HEADERS:
            self._refuse(431, f"a request has at most {HEADERS} headers")
        if self.limits.hosts is not None and (problem := self.limits.hosts.refusal(self.headers)):
            self._refuse(403, problem)
        keys = presented_keys(self.headers, self.url)
        if keys != self.keys:
            self._count_keys(keys)
            if self.limits.per_key is not None and any(self.by_key[key] > self.limits.per_key for key in keys):
                self._refuse(429, "too many connections with this key")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
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
        """Closes a connection whose request is late. One that is not read from, because we are busy, is not."""
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
    """The protocol of one plane."""
    return type("PlaneProtocol", (LimitedProtocol,), {"limits": limits, "by_key": Counter(), "strangers": {}})


def admit(scope: Any) -> None:
    """The request of this ASGI scope came with a known key: its connection may rest as long as any."""
    if (admitted := scope.get("state", {}).get(ADMIT)) is not None:
        admitted()


def presented_keys(headers: Sequence[tuple[bytes, bytes]], url: bytes) -> frozenset[int]:
    """The hash of every key in a head. Which one a protocol takes is its own: a second one hides none."""
    keys = [value.split()[-1:] for name, value in headers if name in KEY_HEADERS]
    if b"?" in url:
        query = url.partition(b"?")[2].decode("latin-1")
        keys += [[value.encode()] for name, value in parse_qsl(query) if name == "key"]
    return frozenset(hash(key) for last in keys for key in last)


async def sweep(servers: Sequence[uvicorn.Server]) -> None:
    """Closes late connections, for as long as it runs."""
    now = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(SWEEP_S)
        for server in servers:
            connections: list[Any] = list(server.server_state.connections)
            for connection in connections:
                connection.close_if_late(now())
