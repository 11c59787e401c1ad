"""The runner against a real server: groups become complete, with their rewards, and ready to be trained on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rolltap.contract.control import RolloutControl
from rolltap.engine.scripted import Rule, Script, ScriptedReply, ToolUse
from rolltap.errors import RuntimeFailed
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.base import Exit, Limits, Source
from rolltap.harnesses.evaluators.python_check import PythonCheck
from rolltap.harnesses.evaluators.registry import SessionCompleted
from rolltap.harnesses.runner.attempts import Progress, Slots, Stage, run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime, ProcessWorkspace
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadRuntime
from rolltap.types import Task

from ..harnesses.house import POLICY, House, house

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CURL = (
    'import json, os, urllib.request as u; b = os.environ["OPENAI_BASE_URL"]; k = os.environ["OPENAI_API_KEY"]; '
    'r = u.Request(b + "/chat/completions", json.dumps({"model": os.environ["OPENAI_MODEL"], '
    '"messages": [{"role": "user", "content": "hi"}]}).encode(), '
    '{"Authorization": "Bearer " + k, "Content-Type": "application/json"}); print(u.urlopen(r).status)'
)
"""An agent in one line: it asks once."""


def bash(command: str) -> ScriptedReply:
    return ScriptedReply(call=(ToolUse(tool="bash", arguments={"command": command}),))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[House]:
    script = Script(
        rules=(Rule(when="Copy", turns=(bash("cp a.txt b.txt"), bash(SUBMIT))),), otherwise=ScriptedReply(say="Hello.")
    )
    async with house(script, tmp_path) as running:
        yield running


async def test_a_group_of_mini_swe_agents_becomes_ready_to_train(home: House, tmp_path: Path) -> None:
    check = PythonCheck(lambda folder: float((folder / "b.txt").read_text() == "hello"))
    task = Task("copy", "Copy a.txt to b.txt.", tags=("easy",))
    runtime = ThreadRuntime(tmp_path / "workspaces")
    assignment = Assignment(task, Files({"a.txt": "hello"}), MiniSweAgentInProcess(), runtime, check)
    (group,) = await run_groups(RolloutRunner(home.client), [assignment], policy=POLICY, n=4)
    assert group.rewards == (1.0,) * 4
    kept = await home.client.get(f"/read/groups/{group.group_id}")
    rollouts = [each["rollout"] for each in kept["rollouts"]]
    assert kept["line"]["status"] == "complete"
    assert [rollout["status"] for rollout in rollouts] == ["succeeded"] * 4
    assert [reward["value"] for rollout in rollouts for reward in rollout["rewards"]] == [1.0] * 4
    for rollout in rollouts:
        session = await home.client.get(f"/read/sessions/{rollout['session_id']}")
        assert session["summary"]["closed_at"] is not None
        assert [call["outcome"] for call in session["calls"]] == ["completed", "completed"]
        assert session["calls"][1]["break_"] is None
    page = await home.client.get("/read/sessions", where="harness=mini-swe-agent-inprocess")
    assert page["total"] == 4, "the list names the harness, though the task did not"


@pytest.mark.parametrize("kind", [ProcessRuntime, BubblewrapRuntime])
async def test_an_agent_of_ones_own_reaches_its_session_from_every_runtime(
    home: House, tmp_path: Path, kind: type[ProcessRuntime | BubblewrapRuntime]
) -> None:
    agent = AnyCommand(("/usr/bin/python3", "-c", CURL))
    assignment = Assignment(Task("ask", "hi"), Files({}), agent, kind(tmp_path / "workspaces"), SessionCompleted())
    (group,) = await run_groups(RolloutRunner(home.client), [assignment], policy=POLICY, n=2)
    assert [rollout.status for rollout in group.rollouts] == ["succeeded"] * 2, group
    sessions = [await home.client.get(f"/read/sessions/{rollout.session_id}") for rollout in group.rollouts]
    assert [len(session["calls"]) for session in sessions] == [1, 1]


class LosesItsPlace(ProcessRuntime):
    """The agents of its first `losses` workspaces have run when the place is lost."""

    def __init__(self, base: Path, losses: int) -> None:
        super().__init__(base)
        object.__setattr__(self, "left", itertools.repeat(True, losses))

    async def prepare(self, source: Source) -> ProcessWorkspace:
        workspace = await super().prepare(source)
        run = workspace.run

        async def lost(*arguments: Any, **more: Any) -> Exit:
            await run(*arguments, **more)
            raise RuntimeFailed("the node went away")

        if next(self.left, False):  # type: ignore[attr-defined]
            workspace.run = lost  # type: ignore[method-assign]
        return workspace


async def test_a_rollout_that_lost_its_place_is_made_again_and_only_the_new_one_is_trained(
    home: House, tmp_path: Path
) -> None:
    agent = AnyCommand(("/usr/bin/python3", "-c", CURL))
    runtime = LosesItsPlace(tmp_path / "workspaces", losses=2)
    assignment = Assignment(Task("ask", "hi"), Files({}), agent, runtime, SessionCompleted())
    (group,) = await run_groups(RolloutRunner(home.client, Slots(run=1)), [assignment], policy=POLICY, n=3)
    assert [(rollout.status, rollout.reward) for rollout in group.rollouts] == [("succeeded", 1.0)] * 3
    assert sorted(rollout.attempt for rollout in group.rollouts) in ([1, 1, 3], [1, 2, 2])
    kept = await home.client.get(f"/read/groups/{group.group_id}")
    assert (kept["line"]["status"], len(kept["rollouts"])) == ("complete", 3)
    assert [each["rollout"]["session_id"] for each in kept["rollouts"]] == [one.session_id for one in group.rollouts]


async def test_what_a_harness_did_before_its_time_was_up_is_kept(home: House, tmp_path: Path) -> None:
    agent = AnyCommand(("/bin/sh", "-c", f"/usr/bin/python3 -c '{CURL}'; sleep 60"))
    limits = Limits(agent_s=2.0)
    runtime = ProcessRuntime(tmp_path / "workspaces")
    assignment = Assignment(Task("slow", "hi"), Files({}), agent, runtime, SessionCompleted(), limits)
    (group,) = await run_groups(RolloutRunner(home.client), [assignment], policy=POLICY, n=1)
    (rollout,) = group.rollouts
    kept = (await home.client.get(f"/read/rollouts/{rollout.rollout_id}"))["rollout"]
    assert (kept["status"], kept["scoring"]) == ("timed_out", "masked")
    session = await home.client.get(f"/read/sessions/{rollout.session_id}")
    assert [call["outcome"] for call in session["calls"]] == ["completed"]


KEEPS_ASKING = f"""
import json, os, urllib.error
ask = lambda messages: json.load(u.urlopen(u.Request(b + "/chat/completions", json.dumps(
    {{"model": os.environ["OPENAI_MODEL"], "messages": messages}}).encode(),
    {{"Authorization": "Bearer " + k, "Content-Type": "application/json"}})))["choices"][0]["message"]
{"; ".join(CURL.split("; ")[:3])}
history, refused = [{{"role": "user", "content": "hi"}}], []
for turn in range(8):
    try:
        history += [ask(history), {{"role": "user", "content": f"and {{turn}}?"}}]
    except urllib.error.HTTPError as error:
        refused.append(error.code)
print(refused)
raise SystemExit(1)
"""
"""An agent that knows no cap."""


async def test_the_cap_of_turns_is_held_by_the_proxy_and_lowered_while_training(home: House, tmp_path: Path) -> None:
    agent, runtime = AnyCommand(("/usr/bin/python3", "-c", KEEPS_ASKING)), ProcessRuntime(tmp_path / "workspaces")

    async def run(turns: int) -> list[str]:
        limits = Limits(turns=turns)
        assignment = Assignment(Task("talk", "hi"), Files({}), agent, runtime, SessionCompleted(), limits)
        (group,) = await run_groups(RolloutRunner(home.client), [assignment], policy=POLICY, n=1)
        (rollout,) = group.rollouts
        assert rollout.status == ("succeeded" if turns else "failed"), rollout.reason
        session = await home.client.get(f"/read/sessions/{rollout.session_id}")
        return [call["outcome"] for call in session["calls"]]

    assert await run(0) == ["completed"] * 8
    assert await run(3) == ["completed"] * 3 + ["refused"] * 5
    await home.client.set_control(POLICY, RolloutControl(max_turns=2))
    assert await run(3) == ["completed"] * 2 + ["refused"] * 6
    await home.client.set_control(POLICY, RolloutControl())
    assert await run(4) == ["completed"] * 4 + ["refused"] * 4


async def test_a_group_that_an_operator_cancels(home: House, tmp_path: Path) -> None:
    cancelled = tmp_path / "cancelled"
    agent = AnyCommand(("/bin/sh", "-c", f"until [ -e {cancelled} ]; do sleep 0.05; done"))
    runtime = ProcessRuntime(tmp_path / "workspaces")
    assignment = Assignment(Task("cancel", "hi"), Files({}), agent, runtime, SessionCompleted())
    runs = asyncio.Event()

    def progress(step: Progress) -> None:
        if step.stage is Stage.RUN:
            runs.set()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            run_groups(RolloutRunner(home.client, progress=progress), [assignment], policy=POLICY, n=2)
        )
        await runs.wait()
        (open_group,) = await home.client.get("/read/groups")
        await home.client.cancel_group(open_group["id"])
        cancelled.touch()
    (group,) = running.result()
    assert [rollout.status for rollout in group.rollouts] == ["cancelled"] * 2
