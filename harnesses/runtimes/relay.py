"""The one hole in a sandbox's network: a listener inside it, whose connections the runner carries to the proxy.

The sandbox has a network namespace of its own with nothing but loopback. Its first process (`HANDOFF`) listens there,
hands the listening socket out to the runner, and only then becomes the agent. The runner accepts on it and connects
each connection to the one address it was made for; the agent can choose nothing.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Endpoint

HANDOFF = """\
import os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=128)
socket.send_fds(channel, [b"x"], [listener.fileno()])
listener.close()
channel.close()
os.execvp(sys.argv[3], sys.argv[3:])
"""
CHUNK = 1 << 16
HANDOFF_S = 30.0
CONNECTIONS = 128
"""Connections of one sandbox at a time: two files each, of the runner's, which all rollouts share."""

SENT_PER_S = 32 << 20
"""Bytes that one sandbox sends a second for long: what it sends faster waits, so that the others' calls do not."""
SAVED_S = 1.0
LEAST_SENT = 16 << 10
"""What a part counts at least, and a new connection: small ones cost the runner nearly as much."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the model really is: the only address that the sandbox's connections are carried to."""

    host: str
    port: int
    tls: bool

    @classmethod
    def of(cls, url: str) -> Target:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TaskInvalid(f"{url!r} is not an http URL")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls)

    @property
    def inner_port(self) -> int:
        """The port inside the sandbox: the same, unless only root may listen on it."""
        return self.port if self.port >= 1024 else self.port + 10_000

    def inside(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` as the agent is told it."""
        path = urlsplit(endpoint.base_url).path
        return replace(endpoint, base_url=f"http://127.0.0.1:{self.inner_port}{path}")


class Pace:
    """Holds one sandbox to `SENT_PER_S`; what it did not use within the last `SAVED_S` it may use at once."""

    def __init__(self) -> None:
        self._used_until = 0.0

    async def take(self, size: int) -> None:
        now = asyncio.get_running_loop().time()
        self._used_until = max(self._used_until, now - SAVED_S) + max(size, LEAST_SENT) / SENT_PER_S
        if self._used_until > now:
            await asyncio.sleep(self._used_until - now)


class Relay:
    """Waits for the sandbox's listener on `channel` and serves it until it is left."""

    def __init__(self, channel: socket.socket, target: Target) -> None:
        self._channel = channel
        self._target = target
        self._task: asyncio.Task[None] | None = None
        self._open = 0
        self._pace = Pace()

    async def __aenter__(self) -> Self:
        self._channel.setblocking(False)
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, RuntimeFailed):
                await self._task
        self._channel.close()

    async def _serve(self) -> None:
        listener = await self._receive()
        server = await asyncio.start_server(self._carry, sock=listener, limit=CHUNK)
        try:
            await server.serve_forever()
        finally:
            server.close()

    async def _receive(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self._channel, lambda: ready.done() or ready.set_result(None))
        try:
            async with asyncio.timeout(HANDOFF_S):
                await ready
        except TimeoutError:
            raise RuntimeFailed("the sandbox did not hand out its listener") from None
        finally:
            loop.remove_reader(self._channel)
        _, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not descriptors:
            raise RuntimeFailed("the sandbox ended before its agent began")
        return socket.socket(fileno=descriptors[0])

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= CONNECTIONS:
            writer.transport.abort()
            return
        self._open += 1
        try:
            await self._pace.take(0)
            await self._connect(reader, writer)
        finally:
            self._open -= 1

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(
                self._target.host, self._target.port, ssl=self._target.tls or None
            )
        except OSError:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_pump(reader, there_writer, self._pace), _pump(there_reader, writer))
        except OSError:
            pass  # one side is gone; both ends are cut, as they would be without a relay
        finally:
            writer.transport.abort()
            there_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace | None = None) -> None:
    """Carries bytes until their end, which is passed on as an end of this direction only."""
    while data := await reader.read(CHUNK):
        if pace is not None:
            await pace.take(len(data))
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
