"""Carries an agent's calls to the proxy, and takes a snapshot of its files before each: it waits for its model then.

The bytes go through unchanged, both ways. The head of a reply says which call it answers (`CALL_HEADER`). A connection
whose bytes are not HTTP/1.1 is carried on without snapshots.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httptools

from rolltap.contract.operations import CALL_HEADER
from rolltap.harnesses.base import Endpoint
from rolltap.harnesses.runner.snapshots import SessionSnapshots
from rolltap.harnesses.runtimes.relay import CHUNK, Target

LAST_INFORMATIONAL = 199


class CallWatch:
    """Listens on loopback until the context ends."""

    def __init__(self, endpoint: Endpoint, snapshots: SessionSnapshots) -> None:
        self._endpoint = endpoint
        self._target = Target.of(endpoint.base_url)
        self._snapshots = snapshots
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0, limit=CHUNK)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def endpoint(self) -> Endpoint:
        """The session's endpoint by way of this listener."""
        port = self._server.sockets[0].getsockname()[1]
        return replace(self._endpoint, base_url=f"http://127.0.0.1:{port}{urlsplit(self._endpoint.base_url).path}")

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            to_proxy = await asyncio.open_connection(
                self._target.host, self._target.port, ssl=self._target.tls or None, limit=CHUNK
            )
            await self._connect((reader, writer), to_proxy)
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone: both ends are cut. asyncio would log a cancellation as an error.
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _connect(
        self,
        agent: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        proxy: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        waiting: deque[int] = deque()  # requests without a reply, each by its snapshot
        requests, replies = _Requests(), _Replies(waiting, self._snapshots)

        async def send() -> None:
            while data := await agent[0].read(CHUNK):
                for method in requests.begun(data):
                    waiting.append(await self._snapshots.take() if method == b"POST" else 0)
                proxy[1].write(data)
                await proxy[1].drain()
            if proxy[1].can_write_eof():
                proxy[1].write_eof()

        async def answer() -> None:
            while data := await proxy[0].read(CHUNK):
                replies.read(data)
                agent[1].write(data)
                await agent[1].drain()
            if agent[1].can_write_eof():
                agent[1].write_eof()

        try:
            await asyncio.gather(send(), answer())
        finally:
            proxy[1].transport.abort()


class _Requests:
    """The requests of one connection."""

    def __init__(self) -> None:
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._begun: list[bytes] = []

    def begun(self, data: bytes) -> list[bytes]:
        """The methods of the requests whose head ends in `data`."""
        if self._parser is not None:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                self._parser = None
        begun, self._begun = self._begun, []
        return begun

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._begun.append(self._parser.get_method())


class _Replies:
    """The replies of one connection, in the order of its requests."""

    def __init__(self, waiting: deque[int], snapshots: SessionSnapshots) -> None:
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._waiting = waiting
        self._snapshots = snapshots
        self._call_id = ""

    def read(self, data: bytes) -> None:
        if self._parser is not None:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                self._parser = None

    def on_message_begin(self) -> None:
        self._call_id = ""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == CALL_HEADER.encode():
            self._call_id = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() > LAST_INFORMATIONAL and self._waiting:
            number = self._waiting.popleft()
            if self._call_id:
                self._snapshots.asked(self._call_id, number)
