"""Forked rollouts begin with the files of the moment of their fork: a harness of one's own, and mini-swe-agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rolltap.engine.scripted import Prompt, ScriptedReply, ToolUse
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.base import Command, Harness, Job, Runtime
from rolltap.harnesses.client import ClaimedRollout
from rolltap.harnesses.evaluators.python_check import PythonCheck
from rolltap.harnesses.runner.attempts import RolloutSummary
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runner.snapshots import SnapshotStore
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadRuntime
from rolltap.types import Task

from ..harnesses.house import POLICY, House, house

AGENT = """
import json, os, pathlib, random, sys, urllib.request
state = pathlib.Path.home() / "history.json"
resumes, message = sys.argv[1:]
history = json.loads(state.read_text()) if resumes else []
if message:
    history.append({"role": "user", "content": message})
while True:
    state.write_text(json.dumps(history))
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": history}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    history.append(reply)
    if reply["content"] == "Done.":
        break
    with open("found.txt", "a") as found:
        found.write(f"{random.getrandbits(64)}\\n")
    pathlib.Path("sub").mkdir(exist_ok=True)
    pathlib.Path("sub", f"{len(history)}.txt").write_text("x")
    pathlib.Path("sub", f"{len(history) - 2}.txt").unlink(missing_ok=True)
    history.append({"role": "user", "content": "Result: " + open("found.txt").read()})
state.write_text(json.dumps(history))
"""
"""Each of its turns adds what nobody could add again to a file, makes another file and removes the one before."""


@dataclass(frozen=True)
class Finder:
    """The agent above, which has its history in HOME."""

    name: str = "finder"
    package: None = None
    dialect: str = "openai_chat"
    quirks: tuple[str, ...] = ()

    def launch(self, job: Job) -> Command:
        return self._command(job, "yes" if job.resume else "", job.instruction)

    def go_on(self, job: Job) -> Command:
        return self._command(job, "yes", "")

    def _command(self, job: Job, *arguments: str) -> Command:
        endpoint = job.endpoint
        return Command(
            ("/usr/bin/python3", "-c", AGENT, *arguments),
            env={
                "OPENAI_BASE_URL": endpoint.v1,
                "OPENAI_API_KEY": endpoint.key,
                "OPENAI_MODEL": endpoint.model,
            },
        )


def reply(prompt: Prompt) -> ScriptedReply:
    """Three turns of work for a user's message, then the end."""
    steps = prompt.text.rpartition("Go")[2].count("Result: ")
    return ScriptedReply(say=f"Step {steps}." if steps < 3 else "Done.")


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    async with house(reply, tmp_path) as running:  # type: ignore[arg-type]
        yield running


@dataclass
class Played:
    """Rollouts with snapshots, and what each working copy held at its end."""

    home: House
    tmp_path: Path
    harness: Harness
    runtime: Runtime

    def __post_init__(self) -> None:
        self.store = SnapshotStore(self.tmp_path / "snapshots")
        self.runner = RolloutRunner(self.home.client)
        self.left: list[list[str]] = []

    async def run(self, rollout: str, task: Task) -> tuple[RolloutSummary, list[str]]:
        """The rollout's end, and the lines of `found.txt` then."""

        def look(folder: Path) -> float:
            self.left.append((folder / "found.txt").read_text().splitlines())
            return 1.0

        files, check = Files({"readme.txt": "x"}), PythonCheck(look)
        work = Assignment(task, files, self.harness, self.runtime, check, snapshots=self.store)
        summary = await self.runner.run(ClaimedRollout(rollout), work)
        return summary, self.left[-1] if self.left else []

    async def open(self, task: Task, n: int = 1) -> Sequence[str]:
        return (await self.home.client.open_group(task, policy=POLICY, n=n)).rollout_ids

    async def calls(self, session_id: str) -> list[dict[str, Any]]:
        return (await self.home.client.get(f"/read/sessions/{session_id}"))["calls"]


@pytest.fixture
def played(home: House, tmp_path: Path) -> Played:
    return Played(home, tmp_path, Finder(), BubblewrapRuntime(tmp_path / "workspaces"))


TASK = Task("find", "Go.")


async def test_forks_of_a_group_go_on_with_the_files_of_their_moment(played: Played) -> None:
    first, second = await played.open(TASK, n=2)
    summary, found = await played.run(first, TASK)
    assert (summary.status, len(found)) == ("succeeded", 3), summary
    calls = await played.calls(summary.session_id)
    assert len(calls) == 4
    for number, call in enumerate(calls):
        for at in (0, 1, None):
            kept = number if at is not None or call is calls[-1] else number + 1
            group = await played.home.client.fork_rollout(first, call["id"], at=at, id=f"{number}-{at}")
            rollout = next(each.id for each in group.rollouts if each.parent and each.parent.fork == f"{number}-{at}")
            if call is calls[-1] and at is None:
                continue  # its agent has ended, so there is nothing to go on with
            forked, now = await played.run(rollout, TASK)
            assert forked.status == "succeeded", forked
            assert now[:kept] == found[:kept], (number, at)
            assert len(now) == 3
            assert not set(now[kept:]) & set(found)
            own = await played.calls(forked.session_id)
            assert (len(own), own[0]["parent_id"]) == (4 - kept, call["id"]), "no call before the fork is asked again"
            assert [each["break_"] for each in own] == [None] * len(own)
    await played.run(second, TASK)


async def test_a_task_s_fork_has_its_instruction_as_the_next_message(played: Played) -> None:
    (first,) = await played.open(TASK)
    summary, found = await played.run(first, TASK)
    last = (await played.calls(summary.session_id))[-1]
    later = Task("more", "Go on.", {"fork": {"rollout": first, "call": last["id"]}})
    forked, now, rollout = summary, found, first
    for rollout in await played.open(later, n=2):
        forked, now = await played.run(rollout, later)
        assert (forked.status, now[:3], len(now)) == ("succeeded", found, 6)
        own = await played.calls(forked.session_id)
        assert (len(own), own[0]["parent_id"], own[0]["break_"]) == (4, last["id"], None)
    again = (await played.calls(forked.session_id))[1]
    deeper = Task("again", "Go!", {"fork": {"rollout": rollout, "call": again["id"]}})
    (third,) = await played.open(deeper)
    forked, deep = await played.run(third, deeper)
    assert (deep[:5], len(deep)) == (now[:5], 8), "a fork of a fork, in the middle of its work"


async def test_without_a_snapshot_a_prompted_fork_is_no_result_and_another_begins_anew(played: Played) -> None:
    first, _ = await played.open(TASK, n=2)
    summary, _ = await played.run(first, TASK)
    calls = await played.calls(summary.session_id)
    later = Task("more", "Go on.", {"fork": {"rollout": first, "call": calls[-1]["id"]}})
    (prompted,) = await played.open(later)
    group = await played.home.client.fork_rollout(first, calls[0]["id"])
    played.store = SnapshotStore(played.tmp_path / "elsewhere")
    forked, _ = await played.run(prompted, later)
    assert forked.status == "failed"
    assert "no snapshot of the files behind call" in forked.reason
    forked, found = await played.run(group.rollouts[-1].id, TASK)
    assert (forked.status, len(found)) == ("succeeded", 3)


async def test_paths_that_no_other_workspace_has_are_refused(played: Played) -> None:
    played.runtime = ProcessRuntime(played.tmp_path / "workspaces")
    first, second = await played.open(TASK, n=2)
    summary, _ = await played.run(first, TASK)
    (call, *_) = await played.calls(summary.session_id)
    group = await played.home.client.fork_rollout(first, call["id"])
    forked, _ = await played.run(group.rollouts[-1].id, TASK)
    assert forked.status == "failed"
    assert "use 'bubblewrap'" in forked.reason
    await played.run(second, TASK)


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def works(prompt: Prompt) -> ScriptedReply:
    """What mini-swe-agent is to run: three steps for each of its user's messages."""
    steps = prompt.text.rpartition("Go")[2].count("<returncode>")
    command = "od -An -N8 -tx8 /dev/urandom >> found.txt" if steps < 3 else SUBMIT
    return ScriptedReply(call=(ToolUse(tool="bash", arguments={"command": command}),))


async def test_mini_swe_agent_goes_on_by_its_own_trajectory(tmp_path: Path) -> None:
    async with house(works, tmp_path) as home:  # type: ignore[arg-type]
        played = Played(home, tmp_path, MiniSweAgentInProcess(), ThreadRuntime(tmp_path / "workspaces"))
        first, second = await played.open(TASK, n=2)
        summary, found = await played.run(first, TASK)
        assert (summary.status, len(found)) == ("succeeded", 3), summary
        calls = await played.calls(summary.session_id)
        for number, at in ((0, 0), (0, None), (2, 1), (2, None)):
            kept = number if at is not None else number + 1
            group = await home.client.fork_rollout(first, calls[number]["id"], at=at, id=f"{number}-{at}")
            rollout = next(each.id for each in group.rollouts if each.parent and each.parent.fork == f"{number}-{at}")
            forked, now = await played.run(rollout, TASK)
            assert (forked.status, now[:kept], len(now)) == ("succeeded", found[:kept], 3), forked
            own = await played.calls(forked.session_id)
            assert (len(own), own[0]["parent_id"]) == (4 - kept, calls[number]["id"])
            assert [each["break_"] for each in own] == [None] * len(own)
        await played.run(second, TASK)
        later = Task("more", "Go on.", {"fork": {"rollout": first, "call": calls[-1]["id"]}})
        (prompted,) = await played.open(later)
        forked, now = await played.run(prompted, later)
        assert (forked.status, now[:3], len(now)) == ("succeeded", found, 6)
        own = await played.calls(forked.session_id)
        assert (len(own), own[0]["parent_id"], own[0]["break_"]) == (4, calls[-1]["id"], None)
