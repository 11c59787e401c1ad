"""What an orchestrator's probes read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket as Socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rolltap.calllog.facts import LogCondition
from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.proxy.app import Rolltap
from rolltap.proxy.planes import health
from rolltap.proxy.server import bind, serve
from rolltap.settings import Settings


class Log:
    """Only what the probe asks."""

    def __init__(self, condition: LogCondition) -> None:
        self._condition = condition

    async def condition(self) -> LogCondition:
        return self._condition


async def probe(
    path: str, condition: LogCondition, *ups: bool, lacks_model: bool = False
) -> tuple[int, dict[str, Any]]:
    known = {"lacks_model": lacks_model, "wrong_weights": "", "wrong_tokenizer": ""}
    policies = SimpleNamespace(
        all=[SimpleNamespace(up=up, engine=SimpleNamespace(name=f"engine{at}"), **known) for at, up in enumerate(ups)]
    )
    app = FastAPI()
    peers = SimpleNamespace(differences={})
    services: Any = SimpleNamespace(call_log=Log(condition), policies=policies, stopping=False, peers=peers)
    app.include_router(health.probes(services))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
        response = await client.get(path)
    return response.status_code, response.json()


@pytest.mark.parametrize(
    ("condition", "ups", "status", "said"),
    [
        (LogCondition(True), [True], 200, ("ready", "ok", "none", "up")),
        (LogCondition(True, False), [True], 200, ("ready", "ok", "full", "up")),
        (LogCondition(False, True), [True, True], 200, ("ready", "away", "ok", "up")),
        (LogCondition(False, False), [True], 503, ("not ready", "away", "full", "up")),
        (LogCondition(False), [True], 503, ("not ready", "away", "none", "up")),
        (LogCondition(True, True), [True, False], 503, ("not ready", "ok", "ok", "down")),
    ],
)
async def test_ready_says_whether_a_new_call_can_be_taken(
    condition: LogCondition, ups: list[bool], status: int, said: tuple[str, ...]
):
    got, body = await probe("/ready", condition, *ups)
    assert got == status
    assert tuple(body[name] for name in ("status", "store", "spool", "engines")) == said


async def test_a_model_that_no_engine_lists_is_said_and_changes_no_status():
    got, body = await probe("/ready", LogCondition(True), True, lacks_model=True)
    assert (got, body["status"], body["models"]) == (200, "ready", "missing")
    assert (await probe("/ready", LogCondition(True), True))[1]["models"] == "served"


async def test_whether_models_are_served_is_unknown_while_an_engine_is_down():
    assert (await probe("/ready", LogCondition(True), True, False))[1]["models"] == "unknown"
    assert (await probe("/ready", LogCondition(True), False, lacks_model=True))[1]["models"] == "unknown"
    assert (await probe("/ready", LogCondition(True), True, False, lacks_model=True))[1]["models"] == "missing"


async def test_a_process_lives_whatever_it_waits_for():
    assert await probe("/health", LogCondition(False, False), False) == (200, {"status": "ok"})


@asynccontextmanager
async def engine_on(socket: Socket) -> AsyncIterator[None]:
    """A chat engine that serves the model `scripted` until the block ends, and then refuses connections."""
    stop = asyncio.Event()
    app = ScriptedEngine(say("yes"), FOLDER, wire="openai").app
    serving = asyncio.create_task(serve({"engine": (app, socket)}, stop))
    try:
        yield
    finally:
        stop.set()
        await serving


async def test_an_engine_that_is_gone_is_down_until_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rolltap.proxy.call.engine_watch.PROBE_EVERY_S", 0.05)
    socket = bind("127.0.0.1", 0)
    port = socket.getsockname()[1]
    policy = {"engine": "main", "model": "scripted"}
    engine = {"kind": "openai_compatible", "url": f"http://127.0.0.1:{port}"}
    settings = Settings.model_validate(
        {"data": tmp_path, "engines": {"main": engine}, "policies": {"p": policy, "unused": policy}}
    )

    async def ready() -> tuple[int, str]:
        response = await admin.get("/ready")
        return response.status_code, response.json()["engines"]

    async def engine_up() -> list[str]:
        key = {"authorization": f"Bearer {app.settings.keys.admin}"}
        text = (await admin.get("/metrics", headers=key)).text
        return [line for line in text.splitlines() if line.startswith("rolltap_engine_up{")]

    async def call() -> int:
        body = {"model": "p", "messages": [{"role": "user", "content": "up?"}]}
        key = {"authorization": f"Bearer {app.settings.keys.project}"}
        return (await agent.post("/v1/chat/completions", json=body, headers=key)).status_code

    async def until(state: tuple[int, str]) -> None:
        async with asyncio.timeout(20):
            while await ready() != state:  # noqa: ASYNC110  the state is another task's
                await asyncio.sleep(0.01)

    async with engine_on(socket):
        running = Rolltap.running(settings)
        app = await running.__aenter__()
        agent = httpx.AsyncClient(transport=httpx.ASGITransport(app.planes["agent"]), base_url="http://agent")
        admin = httpx.AsyncClient(transport=httpx.ASGITransport(app.planes["admin"]), base_url="http://admin")
        assert await call() == 200
    try:
        assert await asyncio.gather(call(), call()) == [503, 503]
        assert await ready() == (200, "up"), "two calls are no proof"
        assert await call() == 503
        await until((503, "down"))
        assert await engine_up() == ['rolltap_engine_up{engine="main"} 0.0']
        async with engine_on(bind("127.0.0.1", port)):
            await until((200, "up"))
            assert await call() == 200
    finally:
        await agent.aclose()
        await admin.aclose()
        await running.__aexit__(None, None, None)
