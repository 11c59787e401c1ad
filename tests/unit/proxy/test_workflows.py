"""Every call of a simulated harness is given the kind, mask and agent that the harness made it for."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.settings import LimitSettings

from .conftest import make_plane
from .recordings import WIRES, replay
from .workflows import COMPACTIONS, HABITS, WORKFLOWS, Workflow, compacted, mixed

SEEDS = range(4)


def dialect_of(seed: int, flow: Workflow) -> str:
    """A protocol, the next one for the next seed; Gemini's has no field that asks for a stream."""
    streams = any("stream" in step.fields for step in flow.steps)
    dialects = [name for name in WIRES if name != "gemini" or not streams]
    return dialects[seed % len(dialects)]


async def judged(tokenizer: Any, flow: Workflow, dialect: str) -> list[tuple[str, str, str]]:
    """The kinds, masks and agents that a workflow's calls are given."""
    plane = await make_plane(tokenizer, LimitSettings(body_mb=1, calls_at_once=4))
    plane.policy.source.max_context = 1 << 16
    await replay(plane, dialect, flow.steps)
    calls = reconstruct([row.call() for row in await plane.rows()]).classifications
    return [(call.kind.value, call.mask, call.agent) for call in calls]


@pytest.mark.parametrize("name", [name for name in WORKFLOWS if name != "mixed"])
async def test_every_call_is_what_it_was_made_for(tokenizer: Any, name: str) -> None:
    for seed in SEEDS:
        flow = Workflow(seed)
        WORKFLOWS[name](flow)
        truths = [(step.kind, step.mask, step.agent) for step in flow.steps]
        assert await judged(tokenizer, flow, dialect_of(seed, flow)) == truths, seed


@pytest.mark.parametrize("name", COMPACTIONS)
async def test_summaries_and_their_discarded_attempts_are_recognised(tokenizer: Any, name: str) -> None:
    for seed in SEEDS:
        flow = Workflow(seed)
        compacted(flow, COMPACTIONS[name], seed % 3 + 1)
        truths = [(step.kind, step.mask, step.agent) for step in flow.steps]
        assert await judged(tokenizer, flow, dialect_of(seed, flow)) == truths, seed


@pytest.mark.parametrize("seed", range(12))
async def test_the_agents_calls_are_told_from_any_mix_of_others(tokenizer: Any, seed: int) -> None:
    """A fork and a failed summary may look the same, so only masks and the agents of trained calls are compared."""
    flow = Workflow(seed)
    mixed(flow)
    calls = await judged(tokenizer, flow, dialect_of(seed, flow))
    trained = [None if mask else agent for _, mask, agent in calls]
    assert trained == [None if step.mask else step.agent for step in flow.steps]


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("name", [name for name in WORKFLOWS if name != "mixed"])
async def test_what_is_trained_does_not_depend_on_a_harness_habits(tokenizer: Any, name: str, habit: str) -> None:
    flow = Workflow(len(name))
    WORKFLOWS[name](flow)
    flow.steps = HABITS[habit](flow.steps)
    calls = await judged(tokenizer, flow, dialect_of(len(name), flow))
    assert [mask for _, mask, _ in calls] == [step.mask for step in flow.steps]
