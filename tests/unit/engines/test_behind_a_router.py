"""Weights are not pushed through a router of vLLM or SGLang (`tests/engines/test_routers.py` has the real ones)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineRefused
from rolltap.proxy.engines.base import Engine
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
