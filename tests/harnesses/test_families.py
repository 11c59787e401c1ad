"""Real releases of real harnesses on model families: the first call works, and every trained token is the engine's.

A cell is a tool loop with parallel calls and a failed tool, then a second prompt in a new process for harnesses that
can resume. Every harness runs on every family that is not `like` another one; there, two cells of light harnesses run.
Without thinking, the light harnesses run on every family, and of the others each on some.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.agents.registry import get_harness
from rolltap.harnesses.base import Ending, Exit

from ..conftest import FAMILY_CELL
from ..families.cells import ALLOWED_BREAKS, FamilyCell, FamilyHouse, family_house, proof_failures
from ..families.families import FAMILIES, Family
from ..families.recorded import RECORDED
from ..families.script import MAKES, SECOND_TASK, TASK
from .matrix import KNOWN_BREAKS
from .scenarios import TOOLS

TIMEOUT_S = 240.0
AT_ONCE = 2
"""Cells of a family that run side by side: harnesses wait for each reply."""

LIGHT = ("codex", "claude-code", "pi")
"""They start in less than a second."""

HEAVY = tuple(name for name in RECORDED if name not in LIGHT)

RESUMES = ("codex", "claude-code", "pi", "opencode", "qwen-code", "gemini-cli")

COMPACTING = ("codex", "claude-code", "opencode")
COMPACTED = ("qwen3", "qwen3.5", "glm-5", "kimi-k2", "mistral_v7 (template)", "nemotron_3_nano (template)")


@dataclass(frozen=True)
class Planned:
    harness: str
    thinking: bool = True
    compacts: bool = False


def planned(family: Family) -> Iterator[Planned]:
    """The cells of a family."""
    number = list(FAMILIES).index(family.name)
    if family.like:
        yield Planned(LIGHT[number % len(LIGHT)])
        yield Planned(LIGHT[(number + 1) % len(LIGHT)], thinking=False)
        return
    yield from (Planned(name) for name in RECORDED)
    yield from (Planned(name, thinking=False) for name in LIGHT)
    yield Planned(HEAVY[number % len(HEAVY)], thinking=False)
    if family.name in COMPACTED:
        yield from (Planned(name, compacts=True) for name in COMPACTING)


@pytest.mark.harness
@pytest.mark.families
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
async def test_harnesses_on_a_family(
    name: str,
    release: Callable[[str], Installation],
    record_property: Callable[[str, object], None],
    tmp_path: Path,
) -> None:
    """Up to 40 CPU seconds: eight real harnesses, one with two or three sessions."""
    family = FAMILIES[name]
    slots = asyncio.Semaphore(AT_ONCE)

    async def run(plan: Planned) -> FamilyCell:
        async with slots:
            return await real_cell(house, plan, installed[plan.harness])

    plans = list(planned(family))
    installed = {plan.harness: release(plan.harness) for plan in plans}
    async with family_house(family, tmp_path) as house:
        cells = await asyncio.gather(*map(run, plans))
    for cell in cells:
        record_property(FAMILY_CELL, asdict(cell))
    failed = [f"{cell.name}: {'; '.join(cell.failures)}" for cell in cells if cell.failures]
    assert not failed, f"{len(failed)} of {len(cells)} cells\n" + "\n".join(failed)


async def real_cell(house: FamilyHouse, plan: Planned, installation: Installation) -> FamilyCell:
    """The cell of a real release."""
    harness, tools, family = get_harness(plan.harness), TOOLS[plan.harness], house.family
    session = await house.open(thinking=plan.thinking)
    if plan.compacts:
        session = replace(session, endpoint=replace(session.endpoint, context=tools.compacts_at))
    summary = tools.asks_summary if plan.compacts else ""
    house.model.add(session.session_id, tools.run, finish=tools.finish, summary=summary, floods=plan.compacts)
    prompts = (TASK, SECOND_TASK) if plan.harness in RESUMES and not plan.compacts else (TASK,)
    exits: list[Exit] = []
    began = time.monotonic()
    async with house.home.workspace(installation) as workspace:
        for number, prompt in enumerate(prompts):
            job = house.home.job(workspace, session, prompt, resume=number > 0)
            exits.append(await house.home.launch(workspace, harness, job, session, timeout=TIMEOUT_S))
            if exits[-1].ending is not Ending.DONE:
                break
        made = {path: (workspace.folder / path).exists() for path in MAKES}
    proof = await house.proof(session.session_id)
    calls = family.tools and family.reads
    insists = bool(tools.finish) and not calls  # on calls: it asks again and again, without the replies that have none
    known, _ = KNOWN_BREAKS.get((plan.harness, "resume"), ({}, ""))
    allowed = ALLOWED_BREAKS | known.keys() | ({"history_edited"} if insists else set())
    failures = list(proof_failures(proof, allowed))
    if exits[-1].ending is not Ending.DONE and not insists:
        last = exits[-1]
        failures.append(f"prompt {len(exits)} ended as {last.ending} after {proof.calls} calls: {last.output[-300:]}")
    if calls and not all(made.values()):
        failures.append(f"files made: {made}")
    if calls and not plan.compacts and not (expected := _calls(plan, family)) <= proof.main:
        failures.append(f"{proof.main} main calls, not {expected}")
    assert harness.package is not None
    return FamilyCell(
        plan.harness, family.name, family.by, release=harness.package.version, dialect=harness.dialect,
        thinking=plan.thinking, compacts=plan.compacts, ran=any(made.values()), proof=proof, failures=tuple(failures),
        seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip


def _calls(plan: Planned, family: Family) -> int:
    """How many main calls a cell has at least."""
    first = 3 if family.parallel else 4
    return first + 2 if plan.harness in RESUMES else first
