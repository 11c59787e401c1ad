"""HTTP/1.1 connections to one model server, kept open between calls.

Every agent call and every read of a stream goes through this client. aiohttp's client takes about five times its CPU,
which was a fifth of a call (docs/adr/0007). httptools parses the replies. The client supports what model servers need
and nothing else: no redirects, cookies, compression or pipelining, and a proxy only for https (`proxy_of`).

A connection carries one exchange at a time. It is reused only if its reply was read to the end.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import cast

import httptools
from cachetools import LRUCache
from yarl import URL

from rolltap.network import notice_death, proxy_of

CONNECT_S = 10.0
IDLE_S = 60.0
"""Seconds that an idle connection is kept. The server may close it earlier."""

MAX_HEAD_BYTES = 64 << 10
READ_AHEAD_BYTES = 1 << 20
"""The connection stops reading from the server while more than this waits for the reader."""


class ConnectionBroken(Exception):
    """The server can't be reached, the connection was lost, or the answer is not HTTP/1.1. The message says which."""


class Connections:
    """The connections to one server. `base` is its URL; `headers` are sent with every request."""

    def __init__(self, base: str, headers: Mapping[str, str]) -> None:
        self._base = base
        url = URL(base)
        self._host, self._port = url.raw_host or "", url.port or 80
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._proxy = URL(proxy) if (proxy := proxy_of(base)) else None
        authority = (url.raw_authority or "").rpartition("@")[2]
        self._common = _header_lines({"host": authority, **headers})
        self._heads: LRUCache[tuple[str, str], bytes] = LRUCache(64)
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Sends a request and returns its reply when the head has arrived. The caller must release or close it.

        Raises `ConnectionBroken`. A GET is sent again if the server had closed the reused connection; a POST is not,
        because the server may have acted on it.
        """
        head = self._head(method, path) + _header_lines({**headers, "content-length": str(len(body))})
        request = b"%b\r\n%b" % (head, body)
        connection = self._take_idle()
        if connection is not None:
            try:
                return await connection.exchange(request)
            except ConnectionBroken:
                if method != "GET":
                    raise
        return await (await self._connect()).exchange(request)

    def close(self) -> None:
        """Closes the idle connections. Exchanges in progress continue."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def keep(self, connection: _Connection) -> None:
        """Stores a connection for reuse, and closes those that were idle for too long."""
        now = time.monotonic()
        while self._idle and self._idle[0].idle_since < now - IDLE_S:
            self._idle.pop(0).close()
        connection.idle_since = now
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """Removes a closed connection from the idle ones, if it is among them."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _take_idle(self) -> _Connection | None:
        """The most recently used idle connection: the server closes the oldest first."""
        connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.idle_since < time.monotonic() - IDLE_S:
            connection.close()
            self.close()
            return None
        return connection

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                if self._proxy is not None:
                    host, port = self._proxy.raw_host or "", self._proxy.port or 80
                    _, connection = await loop.create_connection(lambda: _Connection(self), host, port)
                    await self._tunnel(connection, self._proxy)
                else:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self), self._host, self._port, ssl=self._tls
                    )
        except TimeoutError:
            raise ConnectionBroken(f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:  # TLS errors, too
            raise ConnectionBroken(f"can't connect: {error.strerror or error}") from error
        return connection

    async def _tunnel(self, connection: _Connection, proxy: URL) -> None:
        """Has the proxy lead the connection to the server, and begins TLS with that."""
        place = f"{self._host}:{self._port}"
        headers = {"host": place}
        if proxy.user is not None:
            credentials = b64encode(f"{proxy.user}:{proxy.password or ''}".encode()).decode("ascii")
            headers["proxy-authorization"] = f"Basic {credentials}"
        request = f"CONNECT {place} HTTP/1.1\r\n".encode("ascii") + _header_lines(headers) + b"\r\n"
        reply = await connection.exchange(request)
        if reply.status != 200:
            reply.close()
            raise ConnectionBroken(f"the proxy {proxy.host}:{proxy.port} (HTTPS_PROXY) answered {reply.status}")
        assert self._tls is not None
        await connection.secure(self._tls, self._host)

    def _head(self, method: str, path: str) -> bytes:
        """The request line and the common headers, cached by path."""
        head = self._heads.get((method, path))
        if head is None:
            target = URL(self._base + path).raw_path_qs
            head = f"{method} {target} HTTP/1.1\r\n".encode("ascii") + self._common
            self._heads[method, path] = head
        return head


class Response:
    """The reply of one exchange. Call `release` or `close` when done with it."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: _Connection, status: int, headers: dict[str, str]) -> None:
        self._connection = connection
        self.status = status
        self.headers = headers
        """Names are in lower case."""

    async def read_some(self) -> bytes:
        """The bytes that arrived since the last read, at least one; b"" at the end of the body."""
        return await self._connection.read_some()

    async def pump(self, take: Callable[[bytes], bool]) -> bool:
        """Passes the rest of the body to `take`, inside the reads that bring it: no task is woken for them.

        Returns True at the end of the body, and False once `take` returned False. What `take` raises is raised here.
        """
        return await self._connection.pump(take)

    async def read(self, limit: int | None = None) -> bytes:
        """The whole body; if it is longer than `limit`, at least its first `limit` bytes."""
        parts, size = [], 0
        while part := await self._connection.read_some():
            parts.append(part)
            size += len(part)
            if limit is not None and size >= limit:
                break
        return b"".join(parts)

    def release(self) -> None:
        """Returns the connection for reuse, or closes it if the body was not read to its end."""
        self._connection.release()

    def close(self) -> None:
        """Closes the connection at once, which tells the model server to stop."""
        self._connection.close()


class _Connection(asyncio.Protocol):
    """One connection and its current reply. httptools calls the `on_...` methods."""

    def __init__(self, pool: Connections) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._failure: ConnectionBroken | None = None
        self.idle_since = 0.0
        self._begin()

    async def exchange(self, request: bytes) -> Response:
        """Sends a request and returns the reply when its head has arrived. Cancelling it closes the connection."""
        self._begin()
        self._busy = True
        if self._failure is None and self._transport is not None:
            self._transport.write(request)
        try:
            while not self._head_complete:
                await self._change()
        except BaseException:
            self.close()
            raise
        return Response(self, self._parser.get_status_code(), self._headers)

    async def secure(self, tls: ssl.SSLContext, host: str) -> None:
        """Begins TLS on the connection, which an exchange has led to `host`."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._transport = await loop.start_tls(self._transport, self, tls, server_hostname=host)
        self._begin()

    async def read_some(self) -> bytes:
        while not self._parts:
            if self._complete:
                return b""
            await self._change()
        return self._arrived()

    async def pump(self, take: Callable[[bytes], bool]) -> bool:
        self._take = take
        try:
            self._pass_on()  # what came with the head
            while self._take is not None and not self._complete:
                await self._change()
            goes_on = self._take is not None
        finally:
            self._take = None
        if self._take_failure is not None:
            raise self._take_failure
        return goes_on

    def _pass_on(self) -> None:
        """Gives what arrived to the pump's `take`, if there is one. Its end or failure wakes the pump's task."""
        if self._take is None or not self._parts:
            return
        try:
            goes_on = self._take(self._arrived())
        except Exception as error:  # noqa: BLE001  raised in `pump`: the transport could do nothing with it
            self._take_failure, goes_on = error, False
        if not goes_on:
            self._take = None
            self._wake()

    def _arrived(self) -> bytes:
        """The bytes that arrived and nobody has read."""
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        if self._reusable and not self._parts and self._failure is None:
            self._busy = False
            self._pool.keep(self)
        else:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._fail("the connection was closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (connected := transport.get_extra_info("socket")) is not None:
            notice_death(connected)

    def data_received(self, data: bytes) -> None:
        if not self._busy or self._complete:  # no request is waiting for it
            self.close()
            return
        if not self._head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._pass_on()
            self._break_off(f"the answer is not HTTP/1.1: {error}")
            return
        if not self._head_complete and self._head_bytes > MAX_HEAD_BYTES:
            self._break_off(f"the answer's head has over {MAX_HEAD_BYTES} bytes")
            return
        if self._take is not None:
            self._pass_on()
            if not self._complete:
                return
        if self._buffered > READ_AHEAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_complete and not self._complete and not self._delimited:
            self._complete = True  # without a length, the body ends with the connection
        self._fail(f"the connection was lost: {exc}" if exc else "the server closed the connection")

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # an interim answer such as "100 Continue"
            self._headers = {}
            return
        self._delimited = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._head_complete = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        self._complete = self._head_complete
        self._reusable = self._complete and self._parser.should_keep_alive()  # valid only inside this callback

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._head_complete = False
        self._delimited = False
        self._complete = False
        self._reusable = False
        self._busy = False
        self._paused = False
        self._parts: list[bytes] = []
        self._buffered = 0
        self._take: Callable[[bytes], bool] | None = None
        self._take_failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def _change(self) -> None:
        """Waits for more of the reply; raises `ConnectionBroken` if no more can come."""
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break_off(self, reason: str) -> None:
        self._fail(reason)
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, reason: str) -> None:
        """Records the first failure. Bytes that arrived before it can still be read."""
        if self._failure is None:
            self._failure = ConnectionBroken(reason)
            self._pool.forget(self)
        self._wake()


def _header_lines(headers: Mapping[str, str]) -> bytes:
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        raise ValueError("a header holds a line break")
    return text.encode("latin-1")
