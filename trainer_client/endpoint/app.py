"""The application that the `tinker` SDK talks to, over one base model, and its process.

The service answers a training or sampling request at once with a promise, and the client polls for the result. All
training runs in one thread, one request after another; each sampler has a thread of its own. Errors have the SDK's
shape: a refused request gets an error status with `{"detail"}`; a request that fails later has the result
`{"error", "category"}`. Every route except the health check requires the key.

Not supported: everything that needs an account at Thinking Machines (billing, projects, publishing), images and sounds,
custom losses that run on the server.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rolltap.errors import ConfigError, RolltapError
from rolltap.tokenizer import download_hint
from rolltap.trainer_client.endpoint.lanes import PendingResults
from rolltap.trainer_client.endpoint.model import BaseModelInfo
from rolltap.trainer_client.endpoint.routes import PREFIX, ClientRoutes, SamplingRoutes, TrainingRoutes
from rolltap.trainer_client.endpoint.samplers import Samplers
from rolltap.trainer_client.endpoint.saved import Library
from rolltap.trainer_client.endpoint.sessions import Sessions
from rolltap.trainer_client.lease.folder import locked
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.settings import TrainerSettings

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


KEY_FILE = "tinker-key"


def run(settings: TrainerSettings, name: str, address: tuple[str, int], key: str, models: int, samplers: int) -> None:
    """Serves the base model of `settings` until a signal stops the process.

    Prints the environment variables that clients need once the port accepts connections. Raises `ConfigError` if the
    model's folder, the key or the address is unusable, or under torchrun.
    """
    if not (settings.model / "config.json").is_file():
        raise ConfigError(
            f"--model {settings.model} is not a model's folder: it has no config.json{download_hint(settings.model)}"
        )
    if settings.compute.threads:
        torch.set_num_threads(settings.compute.threads)
    base = BaseModelInfo(name or str(settings.model.resolve()), settings, Ranks.of_environment(settings.compute.device))
    if base.ranks.size > 1:
        raise ConfigError("this service runs in one process, not under torchrun")
    with locked(settings.out), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        key = key or kept_key(settings.out)
        endpoint = TinkerEndpoint(base, Library(settings.out), key, models=models, samplers=samplers)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"can't listen on {address[0]}:{address[1]} ({error}); set another --port") from error
        listener.listen(1024)
        host, port = listener.getsockname()[:2]
        print(f"export TINKER_BASE_URL=http://{host}:{port}")
        print(f"export TINKER_API_KEY={key}")
        print(f"# base model: {base.name}", flush=True)
        endpoint.serve(listener)


def kept_key(out: Path) -> str:
    """The key in the folder `out`. The first start creates its file, which only the owner can read."""
    path = out / KEY_FILE
    if not path.exists():
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as writer:
            writer.write(KEY_PREFIX + secrets.token_urlsafe(32))
    return path.read_text(encoding="utf-8").strip()
