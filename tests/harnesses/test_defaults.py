"""Harnesses as users start them: titles and choices of model are calls of their own, which are not trained.

Each is the shipped definition without the switch that keeps such calls away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from rolltap.engine.scripted import Rule, Script, ScriptedReply
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.agents.registry import get_harness
from rolltap.harnesses.base import Command, Ending, Harness, Job, Launch, Package

from .house import house
from .matrix import Cell
from .scenarios import SCENARIOS, TOOLS, Scenario
from .test_matrix import through

MAIN, SIDE, SUMMARY = ("main", ""), ("auxiliary", "auxiliary"), ("summary", "summary")
"""A call's kind, and the rule that keeps it out of the loss."""


@dataclass(frozen=True)
class DefaultSetUp:
    """A harness's launch without `switch` and its value."""

    shipped: Harness
    switch: str

    @property
    def name(self) -> str:
        return self.shipped.name

    @property
    def package(self) -> Package | None:
        return self.shipped.package

    @property
    def dialect(self) -> str:
        return self.shipped.dialect

    @property
    def quirks(self) -> tuple[str, ...]:
        return self.shipped.quirks

    def launch(self, job: Job) -> Launch:
        launch = self.shipped.launch(job)
        assert isinstance(launch, Command)
        argv = list(launch.argv)
        if self.switch in argv:  # a resumed run of OpenCode has a title already
            at = argv.index(self.switch)
            del argv[at : at + 2]
        else:
            assert job.resume, f"the definition of {self.name} has no {self.switch}"
        return replace(launch, argv=tuple(argv))


SWITCHES = {"opencode": "--title", "gemini-cli": "-m"}
TITLE = Rule(when="You are a title generator", turns=(ScriptedReply(say="A file that holds hi"),))
CHOICE = ScriptedReply(say=json.dumps({"complexity_reasoning": "It is simple.", "complexity_score": 10}))
ROUTER = Rule(when="You are a specialized Task Routing AI", turns=(CHOICE,), afterwards=CHOICE)
ROUTER_AGAIN = msgspec.structs.replace(ROUTER, last="PARTTWO")

KINDS: Mapping[tuple[str, str], list[tuple[str, str]]] = {
    ("opencode", "basic"): [SIDE, MAIN, MAIN, MAIN],
    ("opencode", "resume"): [SIDE, MAIN, MAIN, MAIN, MAIN],
    ("opencode", "compaction"): [SIDE, MAIN, MAIN, SUMMARY, MAIN, MAIN, SUMMARY, MAIN],
    ("gemini-cli", "basic"): [SIDE, MAIN, MAIN, MAIN],
    ("gemini-cli", "resume"): [SIDE, MAIN, MAIN, MAIN, SIDE, MAIN],
}
"""(harness, scenario) → what each call is, in the order of the calls. A title or a router's choice comes first."""


def with_side_calls(script: Script) -> Script:
    """`script` for an engine that is also asked for titles and for a choice of model."""
    return msgspec.structs.replace(script, rules=(TITLE, ROUTER_AGAIN, ROUTER, *script.rules))


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "scenario"), KINDS)
async def test_titles_choices_and_summaries_are_told_from_the_agents_calls(
    name: str,
    scenario: str,
    release: Callable[[str], Installation],
    note_cell: Callable[[Cell], None],
    tmp_path: Path,
) -> None:
    known: Scenario = SCENARIOS[scenario]
    set_up = DefaultSetUp(get_harness(name), SWITCHES[name])
    context, script = TOOLS[name].compacts_at if known.compacts else 0, with_side_calls(known.script(TOOLS[name]))
    async with house(script, tmp_path, context=context, aliases=["*"]) as home:
        run = await through(home, set_up, release(name), known)
        trajectory = await home.reader.trajectory(run.session.session_id)
    note_cell(Cell.of(set_up, f"{scenario}, default set-up", run))
    printed = "\n".join(exit_.output[-2000:] for exit_ in run.exits)
    assert {exit_.ending for exit_ in run.exits} == {Ending.DONE}, printed
    assert run.files == known.makes, printed
    assert [(call.kind.value, call.mask) for call in trajectory.classifications] == KINDS[name, scenario], printed
    assert run.check["verdict"] == "match", run.check
