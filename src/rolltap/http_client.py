"""HTTP to a rolltap server, for everything that talks to its planes: trainers, runners and commands.

`HttpClient` (blocking) and `AsyncHttpClient` send a `Request` and return the parsed reply; `ask` makes the request of
an operation. A client of a plane is written for asyncio; its blocking twin is made of it (`blocking`).

* An error reply is raised as the exception of its code (`rolltap.errors`).
* A server that can't be reached, or whose store or engine can't, is asked again with growing pauses for `patience`
  seconds, and at least twice; then `ServerUnreachable`, or the server's own error. The first failure is logged. A
  request that must not be repeated is marked `once`.
* An error without our body is a balancer's, which answers for a server that it doesn't reach: the same as no answer.
* A redirect is an error, since the key would travel with it, and the environment's proxies are not used.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import itertools
import logging
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import wraps
from http.client import responses
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import aiohttp
import msgspec
import tenacity

from rolltap.contract.operations import Request, RequestTry, request_of
from rolltap.errors import BY_CODE, EngineTimeout, EngineUnavailable, RolltapError, ServerUnreachable, StoreUnavailable
from rolltap.ids import new_id
from rolltap.network import sendable_key, server_url

P = ParamSpec("P")
T = TypeVar("T")
Asked = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
"""An operation: a method of a plane."""

WHOLE_BYTES = 1 << 20
"""A larger body is written in parts, or it would hold up the event loop."""
AWAY = (ServerUnreachable, StoreUnavailable, EngineUnavailable, EngineTimeout)
"""Errors of a server that can't do its work now. To ask again is safe, and may help."""

log = logging.getLogger("rolltap.http_client")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 3.0

NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""OpenSSL's words for a reply that is no TLS."""

UNREACHABLE = (OSError, http.client.HTTPException, aiohttp.ClientError)
"""What a failing connection raises: a time-out is an `OSError`."""


class AnyHttpClient:
    """A server's address and key, and how long to try. `ConfigError` for what is not an http(s) URL, or no key."""

    def __init__(self, url: str, key: str, *, timeout: float, patience: float) -> None:
        self.url = server_url(url)
        self.key = sendable_key(key, f"the key for {self.url}")
        self.headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        self.timeout = timeout
        self.patience = patience

    def retrying(self, request: Request[Any]) -> dict[str, Any]:
        """How tenacity repeats `request`: the first failure is logged, since the tries may take long."""

        def log_first_failure(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            if state.attempt_number == 1 and isinstance(error, Exception):
                failure = error if isinstance(error, RolltapError) else self.unreachable(error)
                log.warning("%s; trying for %g s", failure.message, self.patience)

        enough = tenacity.stop_all(tenacity.stop_before_delay(self.patience), tenacity.stop_after_attempt(2))
        return {
            "retry": tenacity.retry_if_exception_type((*UNREACHABLE, *AWAY)),
            "stop": tenacity.stop_after_attempt(1) if request.once else enough,
            "wait": tenacity.wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            "before_sleep": log_first_failure,
            "reraise": True,
        }

    def tries(self, request: Request[Any]) -> Iterator[dict[str, str]]:
        """The headers of each try. They tell the server which one came first: one that arrives late, as out of a proxy
        that stood still, must not undo what a later one did."""
        id = new_id()
        return ({} if request.method == "GET" else RequestTry(id, number).header for number in itertools.count())

    async def reply(self, operation: Asked[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The reply to an operation. An `HttpClient` never suspends in it, so that `blocking` can run its caller."""
        return await self._reply(request_of(operation, *args, **kwargs))

    async def tell(self, operation: Asked[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """The same where nobody reads the reply, which then says only that the request was carried out."""
        await self._reply(replace(request_of(operation, *args, **kwargs), parse=lambda body: None))

    async def _reply(self, request: Request[T]) -> T:
        raise NotImplementedError

    def unreachable(self, error: Exception) -> ServerUnreachable:
        cause = getattr(error, "os_error", None) or getattr(error, "reason", None) or error  # aiohttp's, urllib's
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        if isinstance(cause, ConnectionError) and cause.errno:  # asyncio's text has the address, which is said
            reason = os.strerror(cause.errno)
        if isinstance(cause, ssl.SSLError) and cause.reason in NO_TLS:
            reason = "what answers there speaks http, not https"
        return ServerUnreachable(
            f"no rolltap server at {self.url} ({reason}); start one with `rolltap serve`, or correct the URL"
        )


class HttpClient(AnyHttpClient):
    """Blocking calls; threads may share it. `timeout` is how long one reply may take, in seconds."""

    def __init__(self, url: str, key: str, *, timeout: float = 60.0, patience: float = 15.0) -> None:
        super().__init__(url, key, timeout=timeout, patience=patience)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

    def send(self, request: Request[T]) -> T:
        try:
            body = tenacity.Retrying(**self.retrying(request))(self._once, request, self.tries(request))
        except UNREACHABLE as error:
            raise self.unreachable(error) from error
        return request.read(body)

    def ask(self, operation: Asked[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The reply to an operation of a plane: `client.ask(AdminPlane.policy, name)`."""
        return self.send(request_of(operation, *args, **kwargs))

    async def _reply(self, request: Request[T]) -> T:
        return self.send(request)

    def _once(self, request: Request[Any], tries: Iterator[dict[str, str]]) -> bytes:
        headers = {**self.headers, **next(tries)}
        outgoing = urllib.request.Request(
            self.url + request.target, method=request.method, data=request.content, headers=headers
        )
        try:
            with self._opener.open(outgoing, timeout=self.timeout + request.wait) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            raise error_of(error.code, error.read(), error.headers.get("retry-after"), self.url) from None


class AsyncHttpClient(AnyHttpClient):
    """The same calls over one pool of connections, in an `async with` block."""

    def __init__(self, url: str, key: str, *, timeout: float = 60.0, patience: float = 15.0) -> None:
        super().__init__(url, key, timeout=timeout, patience=patience)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self.headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(self, request: Request[T]) -> T:
        if self._session is None:
            raise RuntimeError(f"use {type(self).__name__} as a context manager: async with {type(self).__name__}(...)")
        try:
            retrying = tenacity.AsyncRetrying(**self.retrying(request))
            body = await retrying(self._once, self._session, request, self.tries(request))
        except UNREACHABLE as error:
            raise self.unreachable(error) from error
        # A lease may hold hundreds of megabytes.
        return await asyncio.to_thread(request.read, body)

    async def ask(self, operation: Asked[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The reply to an operation of a plane: `await client.ask(AdminPlane.policy, name)`."""
        return await self.send(request_of(operation, *args, **kwargs))

    async def _reply(self, request: Request[T]) -> T:
        return await self.send(request)

    async def _once(
        self, session: aiohttp.ClientSession, request: Request[Any], tries: Iterator[dict[str, str]]
    ) -> bytes:
        limit = aiohttp.ClientTimeout(total=self.timeout + request.wait)
        content = request.content
        data = io.BytesIO(content) if content and len(content) > WHOLE_BYTES else content  # sent in parts
        async with session.request(
            request.method,
            self.url + request.target,
            data=data,
            headers=next(tries),
            timeout=limit,
            allow_redirects=False,
        ) as response:
            body = await response.read()
            if response.status >= 300:
                raise error_of(response.status, body, response.headers.get("retry-after"), self.url)
            return body


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The method of an `HttpClient` that does what a coroutine of its twin does, which waits only for `self.reply`."""

    @wraps(method)
    def block(self: HttpClient, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            method(self, *args, **kwargs).send(None)
        except StopIteration as end:
            return end.value
        raise RuntimeError(f"{method.__qualname__} waits for more than replies")

    return block


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """None makes urllib raise the redirect as an error."""
        return


def error_of(status: int, body: bytes, retry_after: str | None = None, url: str = "the server") -> RolltapError:
    """The exception that an error reply stands for."""
    pause = float(retry_after) if retry_after and retry_after.replace(".", "", 1).isdecimal() else None
    try:
        fields = msgspec.json.decode(body)["error"]
        code, message, param = fields["code"], fields["message"], fields.get("param")
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        answer = f"{url} answered {status} ({responses.get(status, 'an unknown status')})"
        if status < 400:
            return RolltapError(f"{answer}, as no rolltap server does")
        why = "without a rolltap server's error: no server is there, or a balancer doesn't reach one"
        return ServerUnreachable(f"{answer} {why}", retry_after=pause)
    return BY_CODE.get(code, RolltapError)(message, param=param, retry_after=pause)
