"""Connections of all planes, before there is a request: how many, how long, and how large a head may be.

It is uvicorn's protocol with limits: a head has `HEAD_BYTES` and `HEADERS` at most, a request arrives within its
deadline, and a plane has so many connections at once. One sweep a second looks for late ones, so no request costs a
timer. What is refused here never becomes a request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rolltap.proxy.front.hosts import Hosts

HEAD_BYTES = 64 << 10
HEADERS = 128
SWEEP_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`receipt_s`: a request's head has so long from the connection's start or its own first byte, and so has its body
    from then on. `hosts`: who may call; None: anyone."""

    connections: int
    receipt_s: float
    hosts: Hosts | None = None


class _Refused(Exception):
    """Raised in the parser's callbacks: the request ends here, with the answer in `LimitedProtocol.refusal`."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A subclass for each plane sets `limits` (`limited`)."""

    limits: ConnectionLimits
    refusal: tuple[int, str] | None = None
    head_bytes = 0
    late_at = math.inf
    """When this connection is late on the loop's clock; infinite while it waits for us or rests between requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.late_at = self.loop.time() + self.limits.receipt_s
        if len(self.connections) > self.limits.connections:
            self.refusal = (503, "too many connections")
            self.send_400_response("")

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

    def on_headers_complete(self) -> None:
        self.head_bytes = -1  # the rest is body
        self.late_at = self.loop.time() + self.limits.receipt_s
        if len(self.headers) > HEADERS:
            self._refuse(431, f"a request has at most {HEADERS} headers")
        if self.limits.hosts is not None and (problem := self.limits.hosts.refusal(self.headers)):
            self._refuse(403, problem)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.late_at = math.inf
        super().on_message_complete()

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
    return type("PlaneProtocol", (LimitedProtocol,), {"limits": limits})


async def sweep(servers: Sequence[uvicorn.Server]) -> None:
    """Closes late connections, for as long as it runs."""
    now = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(SWEEP_S)
        for server in servers:
            connections: list[Any] = list(server.server_state.connections)
            for connection in connections:
                connection.close_if_late(now())
