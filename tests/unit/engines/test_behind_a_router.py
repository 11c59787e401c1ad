"""Weights are not pushed through a router of vLLM or SGLang (`tests/engines/test_routers.py` has the real ones), nor to
vLLM through any other load balancer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineRefused
from rolltap.proxy.engines.base import Engine, PauseMode
from rolltap.proxy.engines.registry import open_engine
from rolltap.settings import EngineSettings

WORKERS = {"workers": [{"url": "http://gpu-1", "load": 0}, {"url": "http://gpu-2", "load": 0}], "total": 2}


@asynccontextmanager
async def server_with(workers: Response, kind: str) -> AsyncIterator[tuple[ScriptedEngine, Engine]]:
    """A scripted engine that answers `/workers`, and a client of it."""

    async def answer(request: Request) -> Response:
        return workers

    async with ScriptedEngine(say("hi"), FOLDER, wire=kind) as server:
        server.app.routes.append(Route("/workers", answer))
        engine = open_engine("main", EngineSettings.model_validate({"kind": kind, "url": server.url}))
        yield server, engine
        await engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_push_through_a_router_is_refused_before_it_changes_a_server(kind: str, tmp_path: Path) -> None:
    async with server_with(JSONResponse(WORKERS), kind) as (server, engine):
        facts = await engine.probe()
        assert not facts.weight_updates
        assert any("http://gpu-1, http://gpu-2" in note for note in facts.notes)
        for change in (engine.pause("keep"), engine.load_weights(str(tmp_path), 1)):
            with pytest.raises(EngineRefused, match=r"through a router.*http://gpu-1, http://gpu-2") as refused:
                await change
            assert refused.value.http_status == 501
        assert (server.weights.paused, server.weights.loads, server.weights.version) == (False, 0, "default")


@pytest.mark.parametrize(
    "workers",
    [
        HTMLResponse("<title>Everything is here</title>"),
        JSONResponse([]),
        JSONResponse({"workers": []}),
        JSONResponse({"workers": 4}),
        JSONResponse({"detail": "which workers?"}, 400),
        JSONResponse({"detail": "not yours"}, 403),
    ],
    ids=["page", "list", "none", "number", "400", "403"],
)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_another_server_that_has_such_a_route_takes_weights(kind: str, workers: Response, tmp_path: Path) -> None:
    async with server_with(workers, kind) as (server, engine):
        assert (await engine.probe()).weight_updates
        await engine.pause("keep")
        await engine.load_weights(str(tmp_path), 1)
        assert (server.weights.paused, server.weights.version) == (True, "1")
        await engine.resume()


@asynccontextmanager
async def balanced(urls: Sequence[str]) -> AsyncIterator[str]:
    """A load balancer that gives each connection to the next server, as a Service of Kubernetes may."""
    turns, pipes = itertools.cycle(urls), set[asyncio.Task[None]]()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        finally:
            writer.transport.abort()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(next(turns).rpartition(":")[2])
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", port)
        pipes.add(asyncio.create_task(pipe(reader, their_writer)))
        pipes.add(asyncio.create_task(pipe(their_reader, writer)))

    listener = await asyncio.start_server(connect, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()
    for each in pipes:
        each.cancel()
    await asyncio.gather(*pipes, return_exceptions=True)


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
@pytest.mark.parametrize("servers", [1, 2, 4])
async def test_a_push_through_a_load_balancer_needs_one_server_behind_it(servers: int, mode: PauseMode) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine(say("hi"), FOLDER)) for _ in range(servers)]
        url = await stack.enter_async_context(balanced([engine.url for engine in engines]))
        engine = open_engine("main", EngineSettings(kind="vllm", url=url))
        stack.push_async_callback(engine.close)
        await engine.probe()
        if servers == 1:
            await engine.pause(mode)
            assert engines[0].weights.paused
            return
        with pytest.raises(EngineRefused, match="through a load balancer"):
            await engine.pause(mode)
        assert not any(each.weights.paused for each in engines)
