"""A raw HTTP/1.1 client: sends bytes as they are, and reads one answer of whatever came."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import httptools

ENOUGH_S = 30.0
"""When a client gives up, in seconds."""
CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` 0: the server ended the connection without an answer; -1: there was none within `ENOUGH_S`."""

    status: int
    seconds: float
    head: bytes = b""


class _Reading:
    """The callbacks of httptools' parser."""

    def __init__(self) -> None:
        self.complete = self.streams = self.stays_open = False
        self.body = b""
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.streams = self.streams or (name.lower() == b"content-type" and value.startswith(b"text/event-stream"))

    def on_body(self, data: bytes) -> None:
        if len(self.body) < 500:
            self.body += data[:500]

    def on_message_complete(self) -> None:
        self.complete = True
        self.stays_open = self.parser.should_keep_alive()  # only here does the parser still know the headers


class Connection:
    """One connection to a plane, opened anew whenever the server has ended it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, request: bytes) -> Answer:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(ENOUGH_S):
                status, head = await self._exchange(request)
        except TimeoutError:
            self.close()
            return Answer(-1, time.perf_counter() - began)
        return Answer(status, time.perf_counter() - began, head)

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        """The status and the beginning of the body. A connection that the server let go as it rested is opened anew."""
        reused = self._writer is not None
        status, body = await self._once(request)
        return (status, body) if status or not reused else await self._once(request)

    async def _once(self, request: bytes) -> tuple[int, bytes]:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        reading = _Reading()
        with suppress(ConnectionError):
            self._writer.write(request)
            await self._writer.drain()
        while not reading.complete:
            try:
                data = await self._reader.read(CHUNK)
            except ConnectionError:
                data = b""
            if not data:
                break
            reading.parser.feed_data(data)
        if not reading.stays_open:
            self.close()
        return (reading.parser.get_status_code() if reading.complete or reading.body else 0), reading.body

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
