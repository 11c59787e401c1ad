"""What an orchestrator's probes read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rolltap.calllog.base import Condition
from rolltap.proxy.routes import health


class Log:
    """Only what the probe asks."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition

    async def condition(self) -> Condition:
        return self._condition


async def probe(path: str, condition: Condition, *ups: bool) -> tuple[int, dict[str, Any]]:
    policies = SimpleNamespace(
        all=[SimpleNamespace(up=up, engine=SimpleNamespace(name=f"engine{at}")) for at, up in enumerate(ups)]
    )
    app = FastAPI()
    app.include_router(health.router(SimpleNamespace(call_log=Log(condition), policies=policies)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
        response = await client.get(path)
    return response.status_code, response.json()


@pytest.mark.parametrize(
    ("condition", "ups", "status", "said"),
    [
        (Condition(True), [True], 200, ("ready", "ok", "none", "up")),
        (Condition(True, False), [True], 200, ("ready", "ok", "full", "up")),
        (Condition(False, True), [True, True], 200, ("ready", "away", "ok", "up")),
        (Condition(False, False), [True], 503, ("not ready", "away", "full", "up")),
        (Condition(False), [True], 503, ("not ready", "away", "none", "up")),
        (Condition(True, True), [True, False], 503, ("not ready", "ok", "ok", "down")),
    ],
)
async def test_ready_says_whether_a_new_call_can_be_taken(
    condition: Condition, ups: list[bool], status: int, said: tuple[str, ...]
):
    got, body = await probe("/ready", condition, *ups)
    assert got == status
    assert tuple(body[name] for name in ("status", "store", "spool", "engines")) == said


async def test_a_process_lives_whatever_it_waits_for():
    assert await probe("/health", Condition(False, False), False) == (200, {"status": "ok"})
