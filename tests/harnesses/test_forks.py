"""Real releases at a fork: begun anew they get there by recorded replies, and those that resume go on with their files.

A fork's own calls are trained, those of its origin are not, and the harness's own log agrees with the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rolltap.engine.scripted import Prompt, ScriptedReply
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.agents.registry import get_harness
from rolltap.harnesses.base import Ending, Workspace
from rolltap.harnesses.client import ClaimedRollout, OpenedSession
from rolltap.harnesses.evaluators.python_check import PythonCheck
from rolltap.harnesses.logs.check import check_log
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runner.snapshots import SnapshotStore
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import Task

from .house import FIRST_FILES, POLICY, House, house
from .scenarios import PROMPT, SECOND_PROMPT, TOOLS, Tools

NAMES = ("codex", "claude-code", "pi", "mini-swe-agent")
RESUME = NAMES
VOLATILE = [r"Wall time: [0-9.]+ seconds", r"Chunk ID: [0-9a-f]+"]
"""What Codex says anew of the same tool's result."""

TIMEOUT_S = 60.0


class ForkedModel:
    """Makes out.txt, looks at it and ends; another session than the first one looks otherwise."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._first = ""

    def __call__(self, prompt: Prompt) -> ScriptedReply:
        if "MAINTASK" not in prompt.text:
            return ScriptedReply(say="Fine.")
        self._first = self._first or prompt.session
        if "PARTTWO" in prompt.text:
            return self._tools.end("Bye.")
        if "STEP1" not in prompt.text:
            return ScriptedReply(say="STEP1: I create it.", call=(self._tools.run("echo hi > out.txt"),))
        if "STEP2" not in prompt.text:
            looks = "cat out.txt" if prompt.session == self._first else "wc -c out.txt"
            return ScriptedReply(say="STEP2: I look.", call=(self._tools.run(looks),))
        return self._tools.end("It holds hi.")


async def run(
    home: House, workspace: Workspace, name: str, session: OpenedSession, prompt: str = PROMPT, **more: Any
) -> str:
    """One run of a harness to its end; the verdict of its log."""
    harness = get_harness(name)
    exit_ = await home.launch(
        workspace, harness, home.job(workspace, session, prompt, **more), session, timeout=TIMEOUT_S
    )
    assert exit_.ending is Ending.DONE, exit_.output[-2000:]
    await home.client.close_session(session.session_id)
    return await check_log(home.client, session, harness, workspace, exit_)


async def main_rows(home: House, session: OpenedSession) -> list[Any]:
    trajectory = await home.reader.trajectory(session.session_id)
    main = {one.call_id for one in trajectory.classifications if one.kind == "main"}
    return [row for row in await home.app.services.call_log.rows(session.session_id) if row.intent.id in main]


@pytest.mark.harness
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
async def test_a_harness_that_begins_anew_gets_to_the_fork(
    name: str, release: Callable[[str], Installation], tmp_path: Path
) -> None:
    model = ForkedModel(TOOLS[name])
    async with house(model, tmp_path, history_thinking="keep", ignore=VOLATILE) as home:  # type: ignore[arg-type]
        session = await home.open()
        async with home.workspace(release(name)) as workspace:
            await run(home, workspace, name, session)
        first, second, *_ = await main_rows(home, session)
        for at in (None, 2):
            call = first if at is None else second
            fork = await home.client.fork_session(session.session_id, call.intent.id, at=at)
            async with home.workspace(release(name)) as workspace:
                verdict = await run(home, workspace, name, fork)
                assert (workspace.folder / "out.txt").read_text() == "hi\n"
            rows = await main_rows(home, fork)
            assert rows[0].intent.parent_id == call.intent.id
            assert [row.intent.break_ for row in rows] == [None] * len(rows)
            assert verdict.startswith("match"), verdict
            trajectory = await home.reader.trajectory(fork.session_id)
            asked = [entry.id for entry in home.engine.journal.entries if entry.session == fork.session_id]
            trained = [turn.call_id for part in trajectory.segments for turn in part.turns if turn.trained]
            assert trained == [row.intent.id for row in rows]
            assert set(trained) <= set(asked)
            assert not {first.intent.id, second.intent.id} & set(asked)


@pytest.mark.harness
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RESUME)
async def test_a_harness_resumes_from_its_own_files_in_a_fork(
    name: str, release: Callable[[str], Installation], tmp_path: Path
) -> None:
    async with house(ForkedModel(TOOLS[name]), tmp_path, history_thinking="keep") as home:  # type: ignore[arg-type]
        session = await home.open()
        async with home.workspace(release(name)) as workspace:
            await run(home, workspace, name, session)
            last = (await main_rows(home, session))[-1]
            fork = await home.client.fork_session(session.session_id, last.intent.id)
            verdict = await run(home, workspace, name, fork, SECOND_PROMPT, resume=True)
        (row,) = await main_rows(home, fork)
        assert (row.intent.parent_id, row.intent.break_) == (last.intent.id, None)
        assert verdict.startswith("match"), verdict


@dataclass
class RolloutsOf:
    """Rollouts of a release, with snapshots."""

    home: House
    name: str
    installation: Installation
    folder: Path

    async def play(self, task: Task, rollout: str) -> tuple[str, list[Any]]:
        """What out.txt and looked.txt held at the end, and the main calls of the rollout's session."""
        left: list[str] = []

        def look(folder: Path) -> float:
            left.extend(path.read_text() for path in sorted(folder.glob("*.txt")) if path.name != "a.txt")
            return 1.0

        runtime = BubblewrapRuntime(self.home.workspaces, self.installation.bins, self.installation.needs)
        harness, store = get_harness(self.name), SnapshotStore(self.folder)
        work = Assignment(task, Files(FIRST_FILES), harness, runtime, PythonCheck(look), snapshots=store)
        summary = await RolloutRunner(self.home.client).run(ClaimedRollout(rollout), work)
        assert summary.status == "succeeded", summary
        detail = await self.home.client.get(f"/read/sessions/{summary.session_id}")
        assert detail["log_check"]["verdict"] == "match", detail["log_check"]
        return "".join(left), [call for call in detail["calls"] if call["kind"] == "main"]


@pytest.mark.harness
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
async def test_a_rollout_begins_with_the_files_of_its_fork(
    name: str, release: Callable[[str], Installation], tmp_path: Path
) -> None:
    """Behind its last call, and behind the first, when it had only made its file; the record and the log agree.

    Claude Code, resumed in the middle of its work, puts an assistant message of its own there.
    """
    async with house(ForkedModel(TOOLS[name]), tmp_path, history_thinking="keep") as home:  # type: ignore[arg-type]
        rollouts = RolloutsOf(home, name, release(name), tmp_path / "snapshots")
        task = Task("one", PROMPT)
        (first,) = (await home.client.open_group(task, policy=POLICY, n=1)).rollout_ids
        found, calls = await rollouts.play(task, first)
        assert found.startswith("hi\n")
        for call in (calls[-1], *(calls[:1] if name != "claude-code" else ())):
            later = Task("two", SECOND_PROMPT, {"fork": {"rollout": first, "call": call["id"]}})
            (forked,) = (await home.client.open_group(later, policy=POLICY, n=1)).rollout_ids
            assert (await rollouts.play(later, forked))[0].startswith("hi\n")
            session = (await home.client.rollout(forked)).session_id
            own = (await home.client.get(f"/read/sessions/{session}"))["calls"]
            main = [each for each in own if each["kind"] == "main"]
            assert (main[0]["parent_id"], main[0]["break_"]) == (call["id"], None)
            assert "PARTTWO" in str((await home.client.get(f"/read/calls/{main[0]['id']}"))["messages"][-1])
