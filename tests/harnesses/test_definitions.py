"""Harness definitions that the matrix lacks: each runs as it is shipped, and makes calls that are all answered.

Also Qwen Code over Responses, and a log that lost a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rolltap.contract.admin import HarnessLog
from rolltap.engine.scripted import Script, ScriptedReply, ToolUse
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.agents.registry import HARNESSES, get_harness
from rolltap.harnesses.base import Ending, Harness, Limits
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadRuntime

from .house import FIRST_FILES, House, Run, house
from .matrix import Cell
from .scenarios import PROMPT, SCENARIOS, TOOLS
from .test_matrix import RUNS, through

ONE_ANSWER = "one answer"
SAYS_SO = Script(otherwise=ScriptedReply(say="It is done."))
FINAL_ANSWER = Script(
    otherwise=ScriptedReply(call=(ToolUse(tool="final_answer", arguments={"answer": "It is done."}),))
)
SCRIPTS = {
    "cline": SAYS_SO,
    "openhands": SAYS_SO,
    "claude-agent-sdk": SAYS_SO,
    "smolagents": FINAL_ANSWER,
    "aider": SAYS_SO,
    "mistral-vibe": SAYS_SO,
    "hermes": SAYS_SO,
    "qwen-agent": SAYS_SO,
    "gptme": SAYS_SO,
}
IN_PROCESS = "mini-swe-agent-inprocess"


MISTAKES = {
    "no such tool": ScriptedReply(call=(ToolUse(tool="no_such_tool", arguments={}),)),
    "arguments that are no JSON": ScriptedReply(call=(ToolUse(tool="shell", arguments='{"command": '),)),
    "other arguments": ScriptedReply(call=(ToolUse(tool="shell", arguments={"cmd": "ls"}),)),
    "a reply that was cut off": ScriptedReply(say="It is " * 40),
}


def test_every_shipped_harness_runs_in_this_stage() -> None:
    assert sorted([*{name for name, _ in RUNS}, *SCRIPTS, IN_PROCESS]) == sorted(HARNESSES)


async def run_once(home: House, harness: Harness, installation: Installation) -> Run:
    session = await home.open()
    async with home.workspace(installation) as workspace:
        job = home.job(workspace, session, PROMPT)
        exit_ = await home.launch(workspace, harness, job, session, timeout=200)
    return await home.read(Run(session, [exit_]))


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_harness_makes_calls_that_are_answered(
    name: str, release: Callable[[str], Installation], note_cell: Callable[[Cell], None], tmp_path: Path
) -> None:
    """Up to 90 CPU seconds: the test installs the release; pip and npm take most of them."""
    async with house(SCRIPTS[name], tmp_path) as home:
        run = await run_once(home, get_harness(name), release(name))
    note_cell(Cell.of(get_harness(name), ONE_ANSWER, run))
    (exit_,) = run.exits
    assert exit_.ending is Ending.DONE, exit_.output[-2000:]
    assert {call["outcome"] for call in run.calls} == {"completed"}, exit_.output[-2000:]
    assert run.report["trained_calls"] >= 1, run.report


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_of_the_model_is_no_crash_of_the_openai_agents(
    mistake: str, release: Callable[[str], Installation], tmp_path: Path
) -> None:
    """The library raises for some; a crashed rollout has no reward, from which the model would learn to avoid them."""
    script = Script(otherwise=MISTAKES[mistake])
    async with house(script, tmp_path, pin={"max_tokens": 40}) as home:
        harness, session = get_harness("openai-agents"), await home.open()
        async with home.workspace(release("openai-agents")) as workspace:
            job = replace(home.job(workspace, session, PROMPT), limits=Limits(turns=3))
            exit_ = await home.launch(workspace, harness, job, session, timeout=200)
    assert exit_.ending in (Ending.DONE, Ending.LIMIT), exit_.output[-2000:]


@pytest.mark.harness
async def test_mini_swe_agent_runs_inside_the_runner(note_cell: Callable[[Cell], None], tmp_path: Path) -> None:
    harness = get_harness(IN_PROCESS)
    scenario = SCENARIOS["basic"]
    async with house(scenario.script(TOOLS["mini-swe-agent"]), tmp_path) as home:
        session = await home.open()
        workspace = await ThreadRuntime(home.workspaces).prepare(Files(FIRST_FILES))
        exit_ = await workspace.run(harness.launch(home.job(workspace, session, PROMPT)), Limits(), 100)
        assert (workspace.folder / "out.txt").read_text() == "hi\n"
        await workspace.close()
        run = await home.read(Run(session, [exit_]))
    note_cell(Cell.of(harness, "basic", run))
    assert exit_.ending is Ending.DONE, exit_.output
    assert [call["break_"] for call in run.calls] == [None] * 3


@pytest.mark.harness
@pytest.mark.timeout(400)
async def test_qwen_code_over_responses_sends_its_thinking_back(
    release: Callable[[str], Installation], tmp_path: Path
) -> None:
    scenario = SCENARIOS["basic"]
    async with house(scenario.script(TOOLS["qwen-code"]), tmp_path) as home:
        harness = get_harness("qwen-code", dialect="openai_responses")
        run = await through(home, harness, release("qwen-code"), scenario)
    assert [call["break_"] for call in run.calls] == [None] * 3
    assert run.check["verdict"] == "match", run.check


@pytest.mark.harness
@pytest.mark.timeout(400)
async def test_a_log_that_lost_a_turn_is_a_mismatch(release: Callable[[str], Installation], tmp_path: Path) -> None:
    scenario = replace(SCENARIOS["basic"], prompts=(PROMPT,))
    async with house(scenario.script(TOOLS["codex"]), tmp_path) as home:
        run = await through(home, get_harness("codex"), release("codex"), scenario, change=without_second_reply)
    assert run.check["verdict"] == "mismatch"
    assert run.report["trained_calls"] == 0
    assert "log_mismatch" in [found["name"] for found in run.report["findings"]]


def without_second_reply(log: HarnessLog) -> HarnessLog:
    replies = [at for at, entry in enumerate(log.entries) if entry.role == "assistant"]
    return msgspec.structs.replace(log, entries=[entry for at, entry in enumerate(log.entries) if at != replies[1]])
