"""The client for vendors' closed models: sends the harness's bytes and returns the vendor's bytes.

It parses, renders and retries nothing. The upstream's address comes from the settings, its path from the matched route
with a plain name filled in, and only known headers are sent. So no client can direct rolltap to another host, to
another part of a vendor's API, or to another account. The user's key is passed on and never occurs in an error message;
a key in the settings replaces it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlencode

import aiohttp
from yarl import URL

from rolltap.errors import EngineTimeout, EngineUnavailable, InvalidRequest
from rolltap.network import proxy_of
from rolltap.proxy.engines.base import EngineFacts, FixedWeights
from rolltap.proxy.engines.http import IdleTimeout
from rolltap.settings import EngineSettings

KEY_HEADERS = ("authorization", "x-api-key", "x-goog-api-key", "api-key")
KEY_PARAMETER = "key"  # Gemini's
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
        "content-length",
        "content-encoding",
        "set-cookie",
    }
)
"""Headers of a reply that are about one connection."""

SENT = frozenset({*KEY_HEADERS, "accept", "content-type", "user-agent", "originator", "version", "idempotency-key"})
SENT_PREFIXES = (
    *("anthropic-", "openai-", "x-goog-api-client", "x-stainless-", "x-client-request-id", "x-app"),
    *("session", "thread", "conversation"),
    *("x-claude-", "x-codex-", "x-openai-", "x-session-", "x-parent-session", "x-interaction-", "x-initiator"),
    *("x-affinity", "x-litellm-session-id", "chatgpt-account-id"),
)
"""Headers of a request that go to the vendor; the others stay here. They are those that harnesses and SDKs send."""

ACCOUNT_PREFIXES = ("openai-organization", "openai-project", "chatgpt-account-id", "anthropic-workspace")
"""Headers that select the paying account. They are not sent with the settings' key."""

KEYED_QUERY = frozenset({KEY_PARAMETER, "alt", "beta", "limit", "after_id", "before_id", "pageSize", "pageToken"})
"""Query parameters that are allowed with the settings' key."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,199}")
_PATH = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9._:@+-]*)+")
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A request as received. Header names are lower-case; `path` begins with a slash."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def without_key(self, text: str) -> str:
        """`text` with this request's key replaced by `[key]`."""
        keys = [value for name, value in self.headers.items() if name in KEY_HEADERS]
        for value in (*keys, self.query.get(KEY_PARAMETER, "")):
            if key := value.rpartition(" ")[2]:
                text = text.replace(key, "[key]")
        return text


def vendor_path(route: str, parameters: Mapping[str, str]) -> str:
    """The path of `route` (a Starlette pattern) with its parameters in place. Each must be a plain name."""

    def fill(match: re.Match[str]) -> str:
        name, value = match[1], parameters[match[1]]
        if not _NAME.fullmatch(value) or ".." in value:
            raise InvalidRequest(f"{name}: {value[:80]!r} is not a valid name", param=name)
        return value

    return _PARAMETER.sub(fill, route)


@dataclass(slots=True)
class NativeReply:
    """A reply while it arrives. `chunks` can be read once; `complete` is set when the body is complete."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]
    complete: bool = False

    @property
    def streamed(self) -> bool:
        """Whether it is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


class PassthroughUpstream(FixedWeights):
    """One vendor, which speaks `dialects`."""

    kind = "passthrough"
    fixed_because = "a vendor takes no weights"

    def __init__(
        self, name: str, settings: EngineSettings, session: aiohttp.ClientSession, dialects: Collection[str]
    ) -> None:
        self.name = name
        self.dialects = dialects
        self._base = settings.url.strip().rstrip("/")
        self._proxy = proxy_of(self._base)
        self._key = settings.api_key
        self._first_byte_s = settings.first_byte_s
        self._idle_s = settings.idle_s
        self._session = session

    @property
    def keyed(self) -> bool:
        """Whether calls use the settings' key instead of the user's."""
        return bool(self._key)

    async def probe(self) -> EngineFacts:
        """The facts that hold for any vendor. The vendor itself is not asked."""
        return EngineFacts(
            kind=self.kind,
            url=self._base,
            models=(),
            max_context=None,
            weight_versions=False,
            weight_updates=False,
            logprobs_mode="unknown",
            notes=("a vendor's replies are recorded as text and can't be trained",),
        )

    async def close(self) -> None: ...

    @asynccontextmanager
    async def relay(self, request: NativeRequest) -> AsyncIterator[NativeReply]:
        """The vendor's reply with any status. Leaving the context early closes the connection.

        Raises `EngineUnavailable` or `EngineTimeout` only if there is no reply, also while reading `chunks`.
        """
        response = await self._open(request)
        timeout = IdleTimeout(response.close, self._idle_s)
        names = ((name.decode("latin-1").lower(), value) for name, value in response.raw_headers)  # keeps every byte
        headers = {name: value.decode("latin-1") for name, value in names if name not in HOP_BY_HOP}
        reply = NativeReply(response.status, headers, _nothing())
        reply.chunks = self._chunks(request, response, timeout, reply)
        try:
            yield reply
        finally:
            timeout.stop()
            if reply.complete:
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
                    proxy=self._proxy,
                )
        except TimeoutError:
            raise EngineTimeout(f"upstream {self.name} did not begin within {self._first_byte_s:g} s") from None
        except aiohttp.ClientError as error:
            message = f"upstream {self.name} at {self._base} can't be reached: {_words(error, request)}"
            raise EngineUnavailable(message) from None

    async def _chunks(
        self, request: NativeRequest, response: aiohttp.ClientResponse, timeout: IdleTimeout, reply: NativeReply
    ) -> AsyncIterator[bytes]:
        try:
            while chunk := await timeout.wait(response.content.readany()):
                yield chunk
        except aiohttp.ClientError as error:
            if timeout.fired:
                raise EngineTimeout(f"upstream {self.name} was silent for {self._idle_s:g} s") from None
            raise EngineUnavailable(
                f"upstream {self.name} closed the connection during the reply: {_words(error, request)}"
            ) from None
        reply.complete = True

    def _url(self, request: NativeRequest) -> URL:
        """The vendor's URL of a path. The path must need no encoding, so that it cannot be misread."""
        path = request.path
        if not _PATH.fullmatch(path) or ".." in path:
            raise InvalidRequest(f"no upstream path {path[:80]!r}", param="path")
        base = self._base.removesuffix("/v1") if path.startswith("/v1/") else self._base
        query = dict(request.query)
        if self._key:
            for name in query.keys() - KEYED_QUERY:
                raise InvalidRequest(f"{name[:80]}: this vendor's calls take no such parameter", param=name[:80])
            if KEY_PARAMETER in query:
                query[KEY_PARAMETER] = self._key
        return URL(base + path + (f"?{urlencode(query)}" if query else ""), encoded=True)

    def _headers(self, request: NativeRequest) -> dict[str, str]:
        """The request's known headers, with its key in the same field. Asks for an uncompressed reply."""
        dropped = ACCOUNT_PREFIXES if self._key else ()
        headers = {
            name: value
            for name, value in request.headers.items()
            if (name in SENT or name.startswith(SENT_PREFIXES)) and not name.startswith(dropped)
        }
        headers["accept-encoding"] = "identity"
        if self._key:
            key_headers = [name for name in KEY_HEADERS if name in headers] or ["authorization"]
            for name in key_headers:
                headers[name] = f"Bearer {self._key}" if name == "authorization" else self._key
        return headers


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def _words(error: aiohttp.ClientError, request: NativeRequest) -> str:
    """The message of a client error, without the request's URL, which may contain the key."""
    return request.without_key(error.message if isinstance(error, aiohttp.ClientResponseError) else str(error))
