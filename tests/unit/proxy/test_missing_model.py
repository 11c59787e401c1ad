"""A call whose model the engine lacks ends at once, unless a trainer may still push the model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from rolltap.contract.trainer import PolicyState
from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ModelNotLoaded
from rolltap.types import Outcome

from ...harnesses.house import POLICY, opened
from .conftest import serve

USER = {"role": "user", "content": "hi"}
TEXT = "engine main: the model `x` does not exist."


def lacking(plane: Any, *owner: str | None) -> Any:
    """`plane` over an engine that lacks the model, with a ledger that names each `owner` in turn."""
    plane.engine.failure = ModelNotLoaded(TEXT, retry_after=5)
    plane.engine.replies = ["<|im_end|>"] * 3
    owners = iter(owner)

    async def read() -> list[PolicyState]:
        return [PolicyState("tiny", 0, "", owner=next(owners))]

    return serve(plane.log, plane.engine, plane.session, plane.limits, read if owner else None)


async def test_without_a_trainer_the_harness_is_not_asked_to_try_again(plane: Any) -> None:
    answer = await lacking(plane).client.chat(USER)
    assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert answer.json()["error"]["message"] == TEXT
    assert "retry-after" not in answer.headers
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.ENGINE_ERROR


async def test_a_trainer_of_another_process_counts_from_its_start_on(plane: Any) -> None:
    shared = lacking(plane, None, "trainer", "trainer")
    answers = [await shared.client.chat(USER) for _ in range(3)]
    assert [answer.status for answer in answers] == [404, 503, 503]
    assert answers[1].headers["retry-after"] == "5"


async def test_a_client_that_leaves_while_the_ledger_is_asked_leaves_no_open_call(plane: Any) -> None:
    asked, answer_now = asyncio.Event(), asyncio.Event()

    async def read() -> list[PolicyState]:
        asked.set()
        await answer_now.wait()
        return []

    plane.engine.failure = ModelNotLoaded(TEXT, retry_after=5)
    plane.engine.replies = ["<|im_end|>"]
    shared = serve(plane.log, plane.engine, plane.session, plane.limits, read)
    body = {"model": "tiny", "messages": [USER]}
    _, hang_up, task = shared.client.start("/v1/chat/completions", body)
    await asked.wait()
    hang_up.set()
    await asyncio.sleep(0.05)
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.ENGINE_ERROR
    answer_now.set()
    await task


async def test_a_trainer_owns_its_policy_from_its_rewind_on(tmp_path: Path) -> None:
    async with ScriptedEngine(say("Hello."), FOLDER) as engine, opened(engine, tmp_path) as home:
        policy = home.app.policies[POLICY]
        assert not policy.owned
        start = {"step": 0, "versions": {POLICY: 0}, "run": "run"}
        key = {"authorization": f"Bearer {home.app.settings.keys.trainer}"}
        async with httpx.AsyncClient(base_url=home.urls["trainer"], headers=key) as trainer:
            (await trainer.post("/trainers/t/rewind", json=start)).raise_for_status()
        assert policy.owned
    async with ScriptedEngine(say("Hello."), FOLDER) as engine, opened(engine, tmp_path) as home:
        assert home.app.policies[POLICY].owned  # the store says so at the next start
