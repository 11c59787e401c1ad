"""A rollout of a real harness, run again from its record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rolltap.contract.rules import MessageRule, SessionRules
from rolltap.engine.scripted import Rule, Script, ScriptedReply, ToolUse
from rolltap.errors import Forbidden, InvalidRequest, NotFound
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.base import Harness
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.registry import SessionCompleted
from rolltap.harnesses.runner.attempts import run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runner.replay import RecordedRollout, ReplayReport, replay, replay_in
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadRuntime
from rolltap.types import Task

from ..harnesses.house import POLICY, House, house

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str) -> ScriptedReply:
    return ScriptedReply(call=(ToolUse(tool="bash", arguments={"command": command}),))


TURNS = (bash("cat a.txt"), bash("cat b.txt"), bash("ls"), bash(SUBMIT))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    script = Script(rules=(Rule(when="Read", turns=TURNS),), otherwise=ScriptedReply(say="Hello."))
    async with house(script, tmp_path) as running:
        yield running


@dataclass
class Played:
    """A rollout that was played, and how to play it again with other files."""

    home: House
    tmp_path: Path
    harness: Harness
    rollout_id: str = ""

    def work(self, files: dict[str, str], rules: SessionRules) -> Assignment:
        runtime = ThreadRuntime if isinstance(self.harness, MiniSweAgentInProcess) else ProcessRuntime
        return Assignment(
            Task("read", "Read the files."),
            Files(files),
            self.harness,
            runtime(self.tmp_path / "workspaces"),
            SessionCompleted(),
            rules=rules,
        )

    async def play(self, files: dict[str, str], rules: SessionRules) -> None:
        (group,) = await run_groups(RolloutRunner(self.home.client), [self.work(files, rules)], policy=POLICY, n=1)
        (rollout,) = group.rollouts
        assert rollout.status == "succeeded", rollout
        self.rollout_id = rollout.rollout_id

    async def again(self, files: dict[str, str]) -> ReplayReport:
        recorded = await RecordedRollout.read(self.home.client, self.rollout_id)
        return await replay_in(self.home.client, recorded, self.work(files, SessionRules()))


FILES = {"a.txt": "one\n", "b.txt": "two\n"}
HINT = SessionRules((MessageRule(text="Be quick.", call=2),))


async def test_mini_swe_agent_sends_the_same_again(home: House, tmp_path: Path) -> None:
    played = Played(home, tmp_path, MiniSweAgentInProcess())
    await played.play(FILES, HINT)
    asked = len(home.engine.journal.entries)
    report = await played.again(FILES)
    assert report.same, str(report)
    assert (report.recorded, report.replayed) == (4, 4)
    assert len(home.engine.journal.entries) == asked
    session = await home.client.get(f"/read/sessions/{report.session_id}")
    assert session["summary"]["tags"]["purpose"] == "eval"
    assert [call["mask"] for call in session["calls"]] == ["evaluation"] * 4


async def test_a_harness_that_sees_something_else_stops_at_call_3(home: House, tmp_path: Path) -> None:
    played = Played(home, tmp_path, MiniSweAgentInProcess())
    await played.play(FILES, SessionRules())
    asked = len(home.engine.journal.entries)
    report = await played.again({**FILES, "b.txt": "three\n"})
    assert not report.same
    assert report.replayed == 2
    assert report.difference.startswith("call 3: the harness sends something else")
    lines = report.difference.splitlines()
    assert any(line.startswith("- ") and "two" in line for line in lines), report.difference
    assert any(line.startswith("+ ") and "three" in line for line in lines), report.difference
    assert len(home.engine.journal.entries) == asked


ASKS = (
    'import json, os, urllib.request as u; b = os.environ["OPENAI_BASE_URL"]; k = os.environ["OPENAI_API_KEY"]; '
    'r = u.Request(b + "/chat/completions", json.dumps({"model": os.environ["OPENAI_MODEL"], '
    '"messages": [{"role": "user", "content": "hi"}]}).encode(), '
    '{"Authorization": "Bearer " + k, "Content-Type": "application/json"}); print(u.urlopen(r).status)'
)


async def test_from_the_tasks_spec_alone(home: House, tmp_path: Path) -> None:
    """As `rolltap replay` does it."""
    argv = ["/usr/bin/python3", "-c", ASKS]
    spec = {"argv": argv, "runtime": "process", "evaluator": {"kind": "session_completed"}, "files": FILES}
    runtime = ProcessRuntime(tmp_path / "workspaces")
    work = Assignment(Task("ask", "hi", spec), Files(FILES), AnyCommand(tuple(argv)), runtime, SessionCompleted())
    (group,) = await run_groups(RolloutRunner(home.client), [work], policy=POLICY, n=1)
    report = await replay(home.client, group.rollouts[0].rollout_id)
    assert report.same, str(report)
    assert str(report).startswith("1 of 1 recorded calls replayed")


async def test_who_may_replay_what(home: House) -> None:
    empty = await home.client.open_session(policy=POLICY)
    with pytest.raises(InvalidRequest, match="has no calls on record"):
        await home.client.open_replay(empty.session_id)
    with pytest.raises(NotFound):
        await home.client.open_replay("nosuchsession", ttl=60)
    async with AdminClient(home.urls["admin"], home.app.settings.keys.runner) as runner:
        with pytest.raises(Forbidden):
            await runner.open_replay(empty.session_id, ttl=60)
