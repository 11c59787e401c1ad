"""The application that the `tinker` SDK talks to, over one base model.

The service answers a training or sampling request at once with a promise, and the client polls for the result. All
training runs in one thread, one request after another; each sampler has a thread of its own. Errors have the SDK's
shape: a refused request gets an error status with `{"detail"}`; a request that fails later has the result
`{"error", "category"}`. Every route except the health check requires the key.

Not supported: everything that needs an account at Thinking Machines (billing, projects, publishing), images and sounds,
custom losses that run on the server.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rolltap.errors import ConfigError, RolltapError
from rolltap.trainer_client.endpoint.lanes import PendingResults
from rolltap.trainer_client.endpoint.model import BaseModelInfo
from rolltap.trainer_client.endpoint.routes import PREFIX, ClientRoutes, SamplingRoutes, TrainingRoutes
from rolltap.trainer_client.endpoint.samplers import Samplers
from rolltap.trainer_client.endpoint.saved import Library
from rolltap.trainer_client.endpoint.sessions import Sessions

KEY_PREFIX = "tml-"
"""The prefix of every key: the SDK refuses others."""

OPEN = f"{PREFIX}/healthz"
"""The only path that needs no key."""


class TinkerEndpoint:
    """The service. `app` is its ASGI application; it accepts clients that send `key`.

    `models` is the most models in training. `samplers` is the most engines that stay loaded while idle.
    """

    def __init__(self, base: BaseModelInfo, library: Library, key: str, *, models: int = 4, samplers: int = 2) -> None:
        self.library = library
        self.sessions = Sessions(models)
        self.results = PendingResults()
        self.samplers = Samplers(samplers)
        parts = (
            ClientRoutes(base, library, self.sessions, self.results),
            TrainingRoutes(base, library, self.sessions, self.results),
            SamplingRoutes(base, library, self.sessions, self.results, self.samplers),
        )
        routes = [
            Route(PREFIX + path, handler, methods=[method]) for part in parts for method, path, handler in part.routes()
        ]
        handlers: dict[Any, Any] = {RolltapError: _on_error, HTTPException: _on_http_error}
        self.app = keyed(Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers), key)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.library.tidy()
        yield
        await self.results.close()
        await self.samplers.close()

    def serve(self, listener: socket.socket) -> None:
        """Serves until a signal stops the process."""
        config = uvicorn.Config(self.app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[listener])


def keyed(app: Any, key: str) -> Any:
    """Wraps `app` so that it answers 401 to requests without `key` in the header `X-API-Key`.

    Raises `ConfigError` if the key is too short or has another prefix than the SDK accepts.
    """
    if not key.startswith(KEY_PREFIX) or len(key) < 20:
        raise ConfigError(
            f"the key must begin with {KEY_PREFIX!r} , as the SDK demands, and have 20 characters or more"
        )

    async def app_with_key(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN:
            client_key = next((value for name, value in scope["headers"] if name == b"x-api-key"), b"")
            if not hmac.compare_digest(client_key, key.encode()):
                detail = {"detail": "no such key: set TINKER_API_KEY to the one that the service was started with"}
                await JSONResponse(detail, 401, {"connection": "close"})(scope, receive, send)
                return
        await app(scope, receive, send)

    return app_with_key


async def _on_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RolltapError)
    return JSONResponse({"detail": error.message}, error.status)


async def _on_http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": f"{http.method} {http.url.path} is not supported here"}, error.status_code)
