"""The application that the `tinker` SDK talks to, over one base model.

Work is answered with a promise at once, and its result is asked for. Training runs in one thread, one request after
another; sampling runs in the samplers' own. Errors have the SDK's shape: a status with `{"detail"}` where a request is
not taken, a promise with `{"error", "category"}` where it fails. Every route but the health check needs the key.

Limitations: what needs Thinking Machines' own account (billing, projects, publishing), images and sounds, losses that
run on the server.
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
from rolltap.trainer_client.endpoint.bodies import PREFIX
from rolltap.trainer_client.endpoint.client_routes import ClientRoutes
from rolltap.trainer_client.endpoint.lanes import Promises
from rolltap.trainer_client.endpoint.model import Base
from rolltap.trainer_client.endpoint.samplers import Samplers
from rolltap.trainer_client.endpoint.sampling_routes import SamplingRoutes
from rolltap.trainer_client.endpoint.saved import Library
from rolltap.trainer_client.endpoint.sessions import Sessions
from rolltap.trainer_client.endpoint.training_routes import TrainingRoutes

KEY_PREFIX = "tml-"
"""The SDK takes no other keys."""

OPEN = f"{PREFIX}/healthz"


class TinkerEndpoint:
    """The service. `app` is its ASGI application, for clients that have `key`."""

    def __init__(self, base: Base, library: Library, key: str, *, models: int = 4, samplers: int = 2) -> None:
        self.library = library
        self.sessions = Sessions(models)
        self.promises = Promises()
        self.samplers = Samplers(samplers)
        parts = (
            ClientRoutes(base, library, self.sessions, self.promises),
            TrainingRoutes(base, library, self.sessions, self.promises),
            SamplingRoutes(base, library, self.sessions, self.promises, self.samplers),
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
        await self.promises.close()
        await self.samplers.close()

    def serve(self, listener: socket.socket) -> None:
        """Until a signal ends it."""
        config = uvicorn.Config(self.app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[listener])


def keyed(app: Any, key: str) -> Any:
    """`app` behind `key`, sent as `X-API-Key`. `ConfigError` for one that is too short, or that the SDK refuses."""
    if not key.startswith(KEY_PREFIX) or len(key) < 20:
        raise ConfigError(
            f"the key must begin with {KEY_PREFIX!r} , as the SDK demands, and have 20 characters or more"
        )

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN:
            sent = next((value for name, value in scope["headers"] if name == b"x-api-key"), b"")
            if not hmac.compare_digest(sent, key.encode()):
                detail = {"detail": "no such key: set TINKER_API_KEY to the one that the service was started with"}
                await JSONResponse(detail, 401, {"connection": "close"})(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


async def _on_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RolltapError)
    return JSONResponse({"detail": error.message}, error.status)


async def _on_http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": f"{http.method} {http.url.path} is not done here"}, error.status_code)
