"""Real releases of real harnesses through the proxy: every call in the right session, every turn bridged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rolltap.contract.admin import HarnessLog
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.agents.registry import get_harness
from rolltap.harnesses.base import Ending, Harness
from rolltap.harnesses.logs.check import LOG_READERS, read_log

from .house import House, Run, house
from .matrix import KNOWN_BREAKS, Cell
from .scenarios import SCENARIOS, TOOLS, Scenario

TIMEOUT_S = 120.0

ONE_SHOT = ("openclaw", "mini-swe-agent", "openai-agents")

NOT_STREAMED = ("mini-swe-agent", "openai-agents")
"""An engine that fails in the middle of their reply is asked again: nothing of it had reached them."""

RUNS = [
    ("codex", "openai_responses"),
    ("claude-code", "anthropic"),
    ("pi", "openai_chat"),
    ("pi", "openai_responses"),
    ("pi", "anthropic"),
    ("pi", "gemini"),
    ("qwen-code", "openai_chat"),
    ("gemini-cli", "gemini"),
    ("opencode", "openai_chat"),
    ("openclaw", "openai_chat"),
    ("copilot-cli", "openai_chat"),
    ("mini-swe-agent", "openai_chat"),
    ("openai-agents", "openai_responses"),
]
PROTOCOLS = [(name, dialect) for name, dialect in RUNS if name in ("pi", "mini-swe-agent")]
"""Each protocol streamed, and one that is not: they run what the proxy hides, an engine that refuses once."""

ELSEWHERE = [("pi", dialect) for dialect in ("openai_responses", "anthropic", "gemini")]
"""Their long and their cancelled runs are those of the harnesses whose own protocol it is."""

SAMPLE = ("codex-openai_responses", "claude-code-anthropic", "pi-openai_chat")
"""Their basic run is in `make test`."""

CELLS = [
    pytest.param(
        name,
        dialect,
        scenario,
        id=f"{name}-{dialect}-{scenario.name}",
        marks=pytest.mark.sample if scenario.name == "basic" and f"{name}-{dialect}" in SAMPLE else (),
    )
    for name, dialect in RUNS
    for scenario in SCENARIOS.values()
    if TOOLS[name].agent is not None or not scenario.needs_agent
    if TOOLS[name].compacts_at or not scenario.compacts
    if name not in ONE_SHOT or len(scenario.prompts) == 1  # they can't resume
    if scenario.notice or (name, dialect) in PROTOCOLS
    if (name, dialect) not in ELSEWHERE or scenario.name not in ("long", "cancelled")
]


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "dialect", "scenario"), CELLS)
async def test_a_harness_does_not_notice(
    name: str,
    dialect: str,
    scenario: Scenario,
    release: Callable[[str], Installation],
    note_cell: Callable[[Cell], None],
    tmp_path: Path,
) -> None:
    """Up to 15 CPU seconds: most of them are the harness's, once more where the test installs it."""
    harness, tools = get_harness(name, dialect=dialect), TOOLS[name]
    installation = release(name)
    async with house(scenario.script(tools), tmp_path, context=tools.compacts_at if scenario.compacts else 0) as home:
        run = await through(home, harness, installation, scenario)
    cell = Cell.of(harness, scenario.name, run)
    note_cell(cell)
    assert run.check["verdict"] == (scenario.check if name in LOG_READERS else "none"), run.check
    told = "\n".join(exit_.output[-2000:] for exit_ in run.exits)
    if scenario.kill:
        assert [call["outcome"] for call in run.calls][-1] == "aborted"
        assert run.asked[-1].outcome == "cancelled"
        return
    assert [exit_.ending for exit_ in run.exits] == [Ending.DONE] * len(scenario.prompts), told
    assert run.files == scenario.makes, told
    failed = [call for call in run.calls if call["outcome"] != "completed"]
    assert len(failed) == (0 if name in NOT_STREAMED else scenario.failed_calls), (told, failed)
    assert len(run.asked) >= len(run.calls) + (scenario.failed_calls if name in NOT_STREAMED else 0)
    if scenario.compacts:
        assert "compaction" in cell.breaks, told
        assert run.report["calls_by_kind"]["summary"] >= 1
        assert run.report["masked_calls"]["summary"] == run.report["calls_by_kind"]["summary"]
        return
    breaks, _ = KNOWN_BREAKS.get((name, scenario.name), (scenario.breaks, ""))
    assert cell.breaks == breaks, told
    assert cell.bridged == cell.main - 1 - sum(breaks.values())
    assert len(run.asked) >= len(run.calls), "every recorded call was the engine's"
    assert not [entry for entry in run.asked if entry.extends is False and not breaks]


async def through(
    home: House,
    harness: Harness,
    installation: Installation,
    scenario: Scenario,
    change: Callable[[HarnessLog], HarnessLog] = lambda log: log,
) -> Run:
    """Runs the scenario's prompts in one workspace under one session, and reads what was recorded.

    `change` is applied to the harness's own log before that is compared.
    """
    session = await home.open()
    run = Run(session)
    async with home.workspace(installation) as workspace:
        for number, prompt in enumerate(scenario.prompts):
            job = home.job(workspace, session, prompt, resume=number > 0)
            launched = asyncio.create_task(home.launch(workspace, harness, job, session, timeout=TIMEOUT_S))
            if scenario.kill:
                await home.engine.journal.until(lambda entries: any(len(entry.output) > 5 for entry in entries))
                launched.cancel()
                await asyncio.wait({launched})
                await home.engine.journal.until(lambda entries: all(e.outcome != "running" for e in entries))
            else:
                run.exits.append(await launched)
        log = read_log(harness.name, workspace.home_folder, workspace.folder)
        run.log = change(msgspec.structs.replace(log, complete=not scenario.kill)) if log is not None else None
        run.files = {
            path: (workspace.folder / path).read_text() for path in scenario.makes if (workspace.folder / path).exists()
        }
    return await home.read(run)
