"""A judge scores each call by a rubric, beside the task's own check; a recipe of turn rewards reads both."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltap.contract.trainer import LeaseRequest
from rolltap.engine.scripted import Rule, Script, ScriptedReply, ToolUse
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.evaluators.base import CallRubric
from rolltap.harnesses.evaluators.call_rubric import WithCallScores
from rolltap.harnesses.evaluators.python_check import PythonCheck
from rolltap.harnesses.runner.attempts import run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadRuntime
from rolltap.trainer_client.data.step import view
from rolltap.trainer_client.recipes import make_recipe
from rolltap.types import Task

from ..harnesses.house import POLICY, house

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CHECK = PythonCheck(lambda folder: float((folder / "b.txt").read_text() == "hello"))
COPIES = ScriptedReply(say="It copies.\nSCORE: 9")


def bash(command: str) -> ScriptedReply:
    return ScriptedReply(call=(ToolUse(tool="bash", arguments={"command": command}),))


def script(second: ScriptedReply) -> Script:
    """An agent of two steps. `second` is the judge's answer on the step that follows a tool's result."""
    judge = (
        Rule(when="Judge one step", last="\ntool:\n", turns=(), afterwards=second),
        Rule(when="Judge one step", turns=(), afterwards=COPIES),
    )
    return Script(rules=(*judge, Rule(when="Copy", turns=(bash("cp a.txt b.txt"), bash(SUBMIT)))))


@pytest.mark.parametrize(
    ("second", "scores"),
    [
        (ScriptedReply(say="It ends.\nSCORE: 2.5"), [0.9, 0.25]),
        (ScriptedReply(say="SCORE: 10\nsays the agent, and lies."), [0.9]),
        (ScriptedReply(say="SCORE: 11"), [0.9]),
    ],
)
async def test_each_call_has_its_own_reward_beside_the_checks(
    second: ScriptedReply, scores: list[float], tmp_path: Path
) -> None:
    async with house(script(second), tmp_path) as home:
        evaluator = WithCallScores(CHECK, CallRubric(POLICY, "The step makes the copy."), home.client)
        task = Task("copy", "Copy a.txt to b.txt.")
        runtime = ThreadRuntime(tmp_path / "workspaces")
        assignment = Assignment(task, Files({"a.txt": "hello"}), MiniSweAgentInProcess(), runtime, evaluator)
        (group,) = await run_groups(RolloutRunner(home.client), [assignment], policy=POLICY, n=2)
        assert group.rewards == (1.0, 1.0), group
        kept = await home.client.get(f"/read/rollouts/{group.rollouts[0].rollout_id}")
        rewards = {reward["scope"]: reward for reward in kept["rollout"]["rewards"]}
        session = await home.client.get(f"/read/sessions/{group.rollouts[0].session_id}")
        (leased,) = (await home.app.services.ledger.trainers.lease(LeaseRequest("trainer", POLICY, 1))).groups
    calls = [f"call:{call['id']}" for call in session["calls"]]
    assert len(calls) == 2
    assert {scope: reward["value"] for scope, reward in rewards.items()} == {
        "rollout": 1.0,
        **dict(zip(calls, scores, strict=False)),
    }
    assert rewards[calls[0]]["source"] == "call_rubric"
    assert rewards[calls[0]]["detail"]["answer"] == "It copies.\nSCORE: 9"
    assert "answer" not in rewards["rollout"]["detail"]
    step = view([leased])
    assert step.rewards.tolist() == [1.0, 1.0]
    assert [turn.rewarded for turn in step.turns] == [True, len(scores) > 1] * 2
    assert step.turn_rewards.tolist() == [*scores, *[0.0] * (2 - len(scores))] * 2
    assert make_recipe("turn_grpo", {}).credit(step).advantages


async def test_a_judge_that_is_gone_takes_nothing_from_the_check(tmp_path: Path) -> None:
    async with house(script(COPIES), tmp_path) as home:
        evaluator = WithCallScores(CHECK, CallRubric("gone", "The step makes the copy."), home.client)
        runtime = ThreadRuntime(tmp_path / "workspaces")
        task = Task("copy", "Copy a.txt to b.txt.")
        assignment = Assignment(task, Files({"a.txt": "hello"}), MiniSweAgentInProcess(), runtime, evaluator)
        (group,) = await run_groups(RolloutRunner(home.client), [assignment], policy=POLICY, n=1)
        kept = await home.client.get(f"/read/rollouts/{group.rollouts[0].rollout_id}")
    assert [reward["scope"] for reward in kept["rollout"]["rewards"]] == ["rollout"], kept
    assert "calls have no scores" in kept["evaluation"]
