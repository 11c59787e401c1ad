"""Every call of a simulated harness is given the kind, mask and agent that the harness made it for."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.settings import LimitSettings

from .conftest import make_plane
from .recordings import WIRES, replay
from .workflows import COMPACTIONS, WORKFLOWS, Workflow, compacted

SEEDS = range(4)


def dialect_of(seed: int, flow: Workflow) -> str:
    """A protocol, the next one for the next seed; Gemini's has no field that asks for a stream."""
    streams = any("stream" in step.fields for step in flow.steps)
    dialects = [name for name in WIRES if name != "gemini" or not streams]
    return dialects[seed % len(dialects)]


async def mistakes(tokenizer: Any, flow: Workflow, dialect: str) -> list[tuple[int, Any, Any]]:
    """The calls that are not what they were made for: their number, what they are for, and what they were taken for."""
    plane = await make_plane(tokenizer, LimitSettings(body_mb=1, calls_at_once=4))
    plane.policy.source.max_context = 1 << 16
    await replay(plane, dialect, flow.steps)
    calls = reconstruct([row.call() for row in await plane.rows()]).classifications
    truths = [(step.kind, step.mask, step.agent) for step in flow.steps]
    judged = [(call.kind.value, call.mask, call.agent) for call in calls]
    return [(at, truth, seen) for at, (truth, seen) in enumerate(zip(truths, judged, strict=True)) if truth != seen]


@pytest.mark.parametrize("name", WORKFLOWS)
async def test_every_call_is_what_it_was_made_for(tokenizer: Any, name: str) -> None:
    for seed in SEEDS:
        flow = Workflow(seed)
        WORKFLOWS[name](flow)
        dialect = dialect_of(seed, flow)
        assert await mistakes(tokenizer, flow, dialect) == [], dialect


@pytest.mark.parametrize("name", COMPACTIONS)
async def test_summaries_and_their_discarded_attempts_are_recognised(tokenizer: Any, name: str) -> None:
    for seed in range(8):
        flow = Workflow(seed)
        compacted(flow, COMPACTIONS[name], seed % 3 + 1)
        dialect = dialect_of(seed, flow)
        assert await mistakes(tokenizer, flow, dialect) == [], (seed, dialect)
