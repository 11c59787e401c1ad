"""The scripted engine as a server: in a test's own event loop, or as a process."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route
from uvicorn.server import ServerState

from rolltap.engine.http import keyed
from rolltap.engine.scripted.control import Control
from rolltap.engine.scripted.http import SamplingRoute
from rolltap.engine.scripted.journal import Journal
from rolltap.engine.scripted.sampling import Model
from rolltap.engine.scripted.script import ReplyFunction, Script
from rolltap.engine.scripted.wires import sampling_routes
from rolltap.engine.scripted.writing import ScriptedReplyWriter, ScriptTokenizer
from rolltap.errors import ConfigError

CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a scripted engine says it serves.

    `name` is what requests call it, `context` its longest sequence in tokens, `mode` whether its log-probs are those
    after ("processed") or before ("raw") temperature.
    """

    name: str = "scripted"
    mode: Literal["processed", "raw"] = "processed"
    context: int = CONTEXT


SCRIPTED = ServedModel()


class ScriptedEngine:
    """An engine that says what it is told.

        async with ScriptedEngine(say("hello"), tokenizer=folder) as engine:
            ...  # engine.url is served in this event loop
            assert all(entry.extends is not False for entry in engine.journal.entries)

    `tokenizer` is a folder with `tokenizer.json`, `family` its name in `renderers` (or the writer of its replies, for
    a family that the package has not), `wire` the kind of server it stands for, `keep` how many requests the journal
    holds (0: no continuity check, for load tests).
    """

    def __init__(
        self,
        script: Script | ReplyFunction,
        tokenizer: Path,
        *,
        wire: str = "vllm",
        family: str | ScriptedReplyWriter = "qwen3",
        served: ServedModel = SCRIPTED,
        keep: int = 20_000,
    ) -> None:
        self.journal = Journal(keep)
        writer = ScriptedReplyWriter(ScriptTokenizer(Path(tokenizer)), family) if isinstance(family, str) else family
        self.model = Model(script, writer, self.journal, served.context)
        control = Control(self.model, served.name, served.mode)
        sampling: list[BaseRoute] = [
            Route(route.path, SamplingRoute(route, self.model), methods=["POST"])
            for route in sampling_routes(wire, served.mode, writer)
        ]
        self.app = Starlette(routes=[*sampling, *control.routes(wire)])
        self.name = served.name
        self.url = ""
        self._server: asyncio.Server | None = None
        self._state = ServerState()

    @property
    def weights(self) -> Any:
        return self.model.weights

    def release(self) -> None:
        """Lets every reply go on that waits at its `hold`, now and later until `hold`."""
        self.model.released.set()

    def hold(self) -> None:
        """Replies wait at their `hold` again."""
        self.model.released.clear()

    async def __aenter__(self) -> Self:
        config = _config(self.app)
        config.load()
        listener = listen("127.0.0.1", 0)
        self.url = "http://{}:{}".format(*listener.getsockname()[:2])
        protocol: Any = config.http_protocol_class
        self._server = await asyncio.get_running_loop().create_server(
            lambda: protocol(config=config, server_state=self._state, app_state={}), sock=listener
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends at once, whatever is under way."""
        assert self._server is not None
        self._server.close()
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    def run(self, host: str, port: int, key: str = "") -> None:
        """Serves until it is told to stop; the first line on standard output is the URL."""
        app = keyed(self.app, host, key)
        with listen(host, port) as listener:
            print("http://{}:{}".format(*listener.getsockname()[:2]), flush=True)
            uvicorn.Server(_config(app)).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket with Nagle off; `ConfigError` if the port is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port} ({error}); take another --port") from error
    listener.listen(1024)
    return listener


def _config(app: Any) -> uvicorn.Config:
    """Broken connections are part of the script: the server says nothing of them."""
    return uvicorn.Config(
        app, lifespan="off", log_level="critical", access_log=False, timeout_graceful_shutdown=1, timeout_keep_alive=60
    )
