"""What Prometheus reads."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rolltap.calllog.facts import LogCondition
from rolltap.errors import EngineError, StoreUnavailable
from rolltap.proxy.metrics.scrape_state import ProcessState, StoreState, registry_of
from rolltap.types import Outcome

USER = {"role": "user", "content": "hi"}
LINE = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.e+-]+')
NOW = ProcessState(
    LogCondition(store=True), waiting=0, refused=0, connections=None, forged=0, written_again=0, engines={}
)


def series(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert all(LINE.fullmatch(line) for line in lines)
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def read(plane: Any) -> dict[str, float]:
    return series(plane.recorder.metrics.registry)


async def test_calls_are_counted_by_how_they_end(plane: Any) -> None:
    plane.engine.replies = ["one<|im_end|>", "two<|im_end|>"]
    await plane.client.chat(USER)
    await plane.client.chat({"role": "user", "content": "something else"})
    plane.engine.failure = EngineError("broke off")
    await plane.client.chat(USER)
    found = read(plane)
    rows = await plane.rows()
    assert found['rolltap_calls_total{outcome="completed",policy="tiny"}'] == 2
    assert found['rolltap_calls_total{outcome="engine_error",policy="tiny"}'] == 1
    assert found['rolltap_breaks_total{policy="tiny",reason="new_conversation"}'] == 1
    assert found['rolltap_tokens_total{kind="prompt",policy="tiny"}'] == sum(len(row.prompt_ids) for row in rows)
    sampled = sum(len(row.completion.output_ids) for row in rows)
    assert found['rolltap_tokens_total{kind="output",policy="tiny"}'] == sampled
    assert found["rolltap_calls_in_flight"] == 0
    assert found["rolltap_call_seconds_count"] == found['rolltap_call_seconds_bucket{le="+Inf"}'] == 3


async def test_a_store_that_fails_leaves_no_call_in_flight(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(completion: Any) -> None:
        raise StoreUnavailable("disk full")

    monkeypatch.setattr(plane.log, "append_completion", refuse)
    await plane.client.chat(USER)
    found = read(plane)
    assert found["rolltap_calls_in_flight"] == 0
    assert found['rolltap_calls_total{outcome="unrecorded",policy="tiny"}'] == 1


def test_what_is_read_at_the_time() -> None:
    now = replace(NOW, forged=2, engines={"a": True, "c": False}, waiting=3)
    found = series(registry_of(replace(now, condition=LogCondition(store=False, spool=True))))
    found |= series(registry_of(StoreState(0.0, differences=0, versions={"tiny": 7}, ledger=None)))
    assert found["rolltap_forged_handles_total"] == 2
    assert found['rolltap_policy_version{policy="tiny"}'] == 7
    assert found['rolltap_engine_up{engine="c"}'] == 0
    assert (found["rolltap_store_up"], found["rolltap_spool_room"], found["rolltap_facts_waiting"]) == (0, 1, 3)


async def test_a_call_says_where_its_time_went(plane: Any) -> None:
    await plane.client.chat(USER)
    found = read(plane)
    for stage in ("admit", "plan", "intent", "engine", "completion"):
        assert found[f'rolltap_call_stage_seconds_count{{stage="{stage}"}}'] == 1
    assert found['rolltap_first_token_seconds_count{policy="tiny"}'] == 1
    assert found['rolltap_first_token_seconds_sum{policy="tiny"}'] > 0


async def test_a_store_that_refuses_one_of_several_intents_leaves_no_call_in_flight(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the `n` intents are written, one is not: those written end as aborted and the engine is not asked."""
    write, asked = plane.log.append_intent, 0

    async def refuse_the_second(intent: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise StoreUnavailable("disk full")
        await write(intent)

    monkeypatch.setattr(plane.log, "append_intent", refuse_the_second)
    answer = await plane.client.chat(USER, n=3)
    found = read(plane)
    assert answer.status == 503
    assert plane.engine.seen == []
    assert found["rolltap_calls_in_flight"] == 0
    assert found['rolltap_calls_total{outcome="aborted",policy="tiny"}'] == 2
    assert [row.completion.outcome for row in await plane.rows()] == [Outcome.ABORTED] * 2
