"""Closed models: a harness's own bytes go to the vendor and the vendor's own bytes come back.

Nothing is parsed, rendered, tried again or trained: the exchange is recorded as text. The upstream's address is the
settings' and only its path is the request's, so no client can aim rolltap at another host. The user's key passes
through and is in nothing that `recorded` gives; a key in the settings takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlencode

import aiohttp

from rolltap.errors import EngineTimeout, EngineUnavailable, InvalidRequest
from rolltap.proxy.engines.http import Silence
from rolltap.settings import EngineSettings

KEY_HEADERS = ("authorization", "x-api-key", "x-goog-api-key", "api-key")
KEY_PARAMETER = "key"  # Gemini's
SECRET_HEADERS = frozenset({*KEY_HEADERS, "cookie", "set-cookie", "proxy-authorization"})
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "content-encoding",
        "accept-encoding",
        "cookie",
        "set-cookie",
    }
)
RECORD_LIMIT = 8 << 20


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A request as it came. Header names are lower-case; `path` begins with a slash."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def recorded(self) -> dict[str, str]:
        """The headers that may be kept."""
        return {name: value for name, value in self.headers.items() if name not in SECRET_HEADERS}


@dataclass(slots=True)
class NativeReply:
    """A reply as it comes. `chunks` is read once; what it gave is in `body`, up to a limit."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False  # the body has come to its end
    cut: bool = False  # `body` lacks what came after the limit


class PassthroughUpstream:
    """One vendor."""

    kind = "passthrough"

    def __init__(self, name: str, settings: EngineSettings, session: aiohttp.ClientSession) -> None:
        self.name = name
        self._base = settings.url.strip().rstrip("/")
        self._key = settings.api_key
        self._first_byte_s = settings.first_byte_s
        self._idle_s = settings.idle_s
        self._session = session

    @asynccontextmanager
    async def relay(self, request: NativeRequest) -> AsyncIterator[NativeReply]:
        """The vendor's reply, whatever its status. Leaving early closes the connection.

        Raises `EngineUnavailable` or `EngineTimeout` only where the vendor gave no reply; within `chunks` as well.
        """
        response = await self._open(request)
        silence = Silence(response, self._idle_s)
        headers = {name.lower(): value for name, value in response.headers.items() if name.lower() not in HOP_BY_HOP}
        reply = NativeReply(response.status, headers, _nothing())
        reply.chunks = self._chunks(silence, reply)
        try:
            yield reply
        finally:
            silence.stop()
            if reply.whole:
                response.release()
            else:
                response.close()

    async def _open(self, request: NativeRequest) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(self._first_byte_s):
                return await self._session.request(
                    request.method,
                    self._url(request),
                    data=request.body or None,
                    headers=self._headers(request),
                    allow_redirects=False,
                )
        except TimeoutError:
            raise EngineTimeout(f"upstream {self.name} did not begin within {self._first_byte_s:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"upstream {self.name} at {self._base} can't be reached: {error}") from error

    async def _chunks(self, silence: Silence, reply: NativeReply) -> AsyncIterator[bytes]:
        try:
            while chunk := await silence.read():
                room = RECORD_LIMIT - len(reply.body)
                reply.body += chunk[:room]
                reply.cut = reply.cut or len(chunk) > room
                yield chunk
        except aiohttp.ClientError as error:
            if silence.fired:
                raise EngineTimeout(f"upstream {self.name} was silent for {self._idle_s:g} s") from None
            raise EngineUnavailable(f"upstream {self.name} broke off: {error}") from error
        reply.whole = True

    def _url(self, request: NativeRequest) -> str:
        path = request.path
        if not path.startswith("/") or path.startswith("//") or ".." in path.split("/") or "\\" in path:
            raise InvalidRequest(f"no upstream path {path!r}", param="path")
        base = self._base.removesuffix("/v1") if path.startswith("/v1/") else self._base
        query = dict(request.query)
        if self._key and KEY_PARAMETER in query:
            query[KEY_PARAMETER] = self._key
        return base + path + (f"?{urlencode(query)}" if query else "")

    def _headers(self, request: NativeRequest) -> dict[str, str]:
        """The request's headers, its key in the same place; the reply is asked for as plain bytes."""
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        headers["accept-encoding"] = "identity"
        if self._key:
            held = [name for name in KEY_HEADERS if name in headers] or ["authorization"]
            for name in held:
                headers[name] = f"Bearer {self._key}" if name == "authorization" else self._key
        return headers


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
