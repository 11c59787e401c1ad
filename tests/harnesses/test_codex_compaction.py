"""Codex with its built-in provider at another address compacts on the server: the proxy gives it a compaction item."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.engine.scripted import Rule, Script, ScriptedReply
from rolltap.harnesses.agents.codex import Codex
from rolltap.harnesses.base import Command, Ending, Job

from .conftest import installed
from .house import house
from .matrix import Cell
from .scenarios import SCENARIOS, TOOLS, main_rule
from .test_matrix import through

NEWEST = ("0.171.0", "0.169.0", "0.166.0")
ASKS = "Summarize this conversation."
FLOODS = 4


class BuiltInProvider(Codex):
    """As a user points it, with the model's context."""

    def __init__(self, version: str) -> None:
        self.package = replace(Codex.package, version=version)

    def launch(self, job: Job) -> Command:
        argv = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        argv += ["-m", job.endpoint.model, "-c", f"openai_base_url={json.dumps(job.endpoint.v1)}"]
        argv += ["-c", f"model_context_window={job.endpoint.context}"]
        argv += ["-c", "check_for_update_on_startup=false", "-c", "analytics.enabled=false"]
        argv += ["--disable", "plugins", "--disable", "apps", job.instruction]
        return Command(tuple(argv), env={"CODEX_API_KEY": job.endpoint.key})


def script() -> Script:
    tools = TOOLS["codex"]
    floods = [
        ScriptedReply(say=f"I read the numbers, time {time}.", call=(tools.run("seq 1 1500"),))
        for time in range(FLOODS)
    ]
    summaries = [
        ScriptedReply(think="hm", say=f"MAINTASK is to read numbers; part {part} of them has been read by now.")
        for part in range(9)
    ]
    last = ScriptedReply(call=(tools.run("echo hi > out.txt"),))
    asked = Rule(last=ASKS, turns=tuple(summaries), count="session")
    return Script(rules=(asked, main_rule(*floods, last, tools.end("Done."))), otherwise=ScriptedReply(say="Fine."))


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", NEWEST)
async def test_codex_compacts_on_the_server_and_goes_on(
    version: str, note_cell: Callable[[Cell], None], tmp_path: Path
) -> None:
    harness = BuiltInProvider(version)
    installation = await asyncio.to_thread(installed, harness.package)
    scenario = replace(SCENARIOS["compaction"], makes={"out.txt": "hi\n"})
    async with house(script(), tmp_path, max_context=48_000) as home:
        run = await through(home, harness, installation, scenario)
    note_cell(Cell.of(harness, "server compaction", run))
    (exit_,) = run.exits
    assert exit_.ending is Ending.DONE, exit_.output
    assert run.files == scenario.makes, exit_.output
    summaries = run.report["calls_by_kind"]["summary"]
    assert summaries >= 1
    assert run.report["masked_calls"]["summary"] == summaries
    assert all(call["outcome"] == "completed" for call in run.calls), exit_.output
    breaks = [call["break_"]["reason"] for call in run.calls if call["break_"] is not None]
    assert breaks == ["compaction"] * summaries, breaks
    assert run.check["verdict"] == "match", run.check
