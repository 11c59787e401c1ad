"""The agent plane's application: model calls and nothing else.

Routes are the dialects' own, each also under `/s/{session}`. They are plain ASGI endpoints: no middleware stands
between a harness and the gateway.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route

from rolltap.errors import NotFound, RequestError, RolltapError
from rolltap.proxy.call.http_exchange import BrokenReply, ClientGone, Exchange
from rolltap.proxy.call.path import Gateway
from rolltap.proxy.call.sources.relay import Relay
from rolltap.proxy.dialects.base import Action, Dialect, WireRequest
from rolltap.settings import LimitSettings

log = logging.getLogger("rolltap.agent_plane")

SESSION_PREFIX = "/s/{session}"


class Endpoint:
    """One dialect's route as an ASGI application."""

    def __init__(self, dialect: Dialect, action: Action, gateway: Gateway, relay: Relay, limits: LimitSettings) -> None:
        self._dialect = dialect
        self._action: Action = action
        self._relay = relay
        self._limits = limits
        self._gateway = gateway
        self._recorded = action == "generate"
        self._handle = {
            "generate": gateway.generate,
            "count_tokens": gateway.count_tokens,
            "models": gateway.models,
            "model": gateway.models,
            "retrieve": gateway.retrieve,
        }[action]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            body = await self._body(scope, exchange)
            wire = wire_request(scope, body)
            if not await self._relay.take(self._action, self._dialect, wire, exchange):
                await self._handle(self._dialect, wire, exchange)
        except ClientGone:
            return
        except BrokenReply:
            raise
        except RolltapError as error:
            await exchange.reply(self._dialect.error(error))
        except Exception as error:
            log.exception("%s %s failed inside rolltap", scope["method"], scope["path"])
            if exchange.started:
                raise BrokenReply("failed inside rolltap") from error
            await exchange.reply(self._dialect.error(RolltapError("internal error; the server's log has it")))

    async def _body(self, scope: Any, exchange: Exchange) -> bytes:
        """The whole body. A model call whose body is too large or too slow is recorded as refused."""
        try:
            return await exchange.body(int(self._limits.body_mb * 1_000_000), self._limits.receipt_s)
        except RequestError as error:
            if self._recorded:
                await self._gateway.refuse(self._dialect, wire_request(scope, b""), error)
            raise


def wire_request(scope: Any, body: bytes) -> WireRequest:
    """The request as dialects want it. Only ASGI's own path is believed, never the Host header."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
    return WireRequest(scope["path"], scope.get("path_params", {}), query, headers, body)


def agent_app(
    dialects: Mapping[str, Dialect], gateway: Gateway, relay: Relay, limits: LimitSettings, probes: list[BaseRoute]
) -> Starlette:
    """The plane's application; `probes` are the static answers that harnesses look for before they call."""
    routes: list[BaseRoute] = []
    for dialect in dialects.values():
        for route in dialect.routes:
            endpoint = Endpoint(dialect, route.action, gateway, relay, limits)
            for path in (route.path, SESSION_PREFIX + route.path):
                routes.append(Route(path, endpoint, methods=[route.method]))
    fallback = next(iter(dialects.values()))

    async def not_found(scope: Any, receive: Any, send: Any) -> None:
        error = NotFound(f"no route {scope['method']} {scope['path']} on the agent plane")
        await Exchange(scope, receive, send).reply(fallback.error(error))

    app = Starlette(routes=[*routes, *probes])
    app.router.default = not_found
    return app
