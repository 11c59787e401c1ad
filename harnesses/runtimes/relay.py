"""The only way out of a sandbox's network: a listener inside it, whose connections the runner relays to the proxy.

The sandbox has its own network namespace with only loopback. Its first process (`HANDOFF`) listens there, sends the
listening socket to the runner, and only then execs the agent. The runner accepts connections on it and connects each to
one fixed address; the agent can't choose another.
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
from rolltap.network import allow_files

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
"""The most connections of one sandbox at a time. Each takes two of the runner's files, which all rollouts share."""
FILES = 128 * CONNECTIONS
"""The runner's limit of open files: a few agents could use up the usual 1,024, and no rollout would begin or end."""

SENT_PER_S = 32 << 20
"""A sandbox's sustained rate in bytes per second. Faster sending waits, so that other sandboxes' calls don't."""
SAVED_S = 1.0
LEAST_SENT = 16 << 10
"""The least bytes counted per part and per new connection: small ones cost the runner nearly as much."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model's real address: the only one that the sandbox's connections reach."""

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
        """The port inside the sandbox: the same, or 10,000 higher if only root may listen on it."""
        return self.port if self.port >= 1024 else self.port + 10_000

    def inside(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` with the address inside the sandbox."""
        path = urlsplit(endpoint.base_url).path
        return replace(endpoint, base_url=f"http://127.0.0.1:{self.inner_port}{path}")


class Pace:
    """Limits one sandbox to `SENT_PER_S`, with a burst of what it did not use in the last `SAVED_S` seconds."""

    def __init__(self) -> None:
        self._used_until = 0.0

    async def take(self, size: int) -> None:
        now = asyncio.get_running_loop().time()
        self._used_until = max(self._used_until, now - SAVED_S) + max(size, LEAST_SENT) / SENT_PER_S
        if self._used_until > now:
            await asyncio.sleep(self._used_until - now)


class Relay:
    """Waits for the sandbox's listener on `channel`, and serves it until the context ends."""

    def __init__(self, channel: socket.socket, target: Target) -> None:
        self._channel = channel
        self._target = target
        self._task: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._ended = False
        self._pace = Pace()

    async def __aenter__(self) -> Self:
        allow_files(FILES)
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
            await asyncio.Event().wait()  # from Python 3.12 on, the end of `serve_forever` waits for the connections
        finally:
            self._ended = True
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

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
        if self._ended or len(self._connections) >= CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._pace.take(0)
            await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one side or the sandbox is gone: both ends are cut. asyncio would log a cancellation as an error.
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proxy_reader, proxy_writer = await asyncio.open_connection(
            self._target.host, self._target.port, ssl=self._target.tls or None
        )
        try:
            await asyncio.gather(_pump(reader, proxy_writer, self._pace), _pump(proxy_reader, writer))
        finally:
            proxy_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace | None = None) -> None:
    """Copies bytes until the end of the stream, then closes only this direction."""
    while data := await reader.read(CHUNK):
        if pace is not None:
            await pace.take(len(data))
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
