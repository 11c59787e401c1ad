"""Environments of real packages, each in an environment of its own: played in a sandbox, paid by their own scorers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rolltap.contract.admin import SubmitTasks
from rolltap.engine.scripted import Rule, Script, ScriptedReply, ToolUse
from rolltap.harnesses.runner.node import NodeAgent, NodeSettings
from rolltap.harnesses.runner.specs import Defaults, resolve_paths
from rolltap.harnesses.runner.tasks import SourceOptions, tasks_of
from rolltap.types import Rollout

from ..conftest import ROOT
from ..harnesses.house import POLICY, house
from ..unit.harnesses.environments import FORGE

HERE = Path(__file__).parent
AGENT_S = 600.0

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]


def answers(**replies: str) -> Script:
    """A model that answers by a word of its prompt."""
    words = {word.replace("_", " "): reply for word, reply in replies.items()}
    return Script(
        rules=tuple(Rule(when=word, turns=(ScriptedReply(say=reply),)) for word, reply in words.items()),
        otherwise=ScriptedReply(say="I don't know."),
    )


def python_of(name: str) -> str:
    python = ROOT / ".cache" / "trainers" / name / "bin" / "python"
    assert python.exists(), f"make trainers: {python} is not there"
    return str(python)


@dataclass(frozen=True)
class Case:
    """An environment of a package, what the model says in it, and what the package's scorer makes of that, by task."""

    target: str
    environment: str
    script: Script
    rewards: Mapping[str, float]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    harness: str = ""
    policy: str | Mapping[str, str] = POLICY
    scopes: Mapping[str, float] = field(default_factory=dict)


CAPITALS = answers(France="Paris.", Peru="It is Lima, the city of kings.")
SUMS = answers(**{"2_+_2": "The answer is 4", "17_+_25": "The answer is 41"})
DOORS = Script(
    rules=(Rule(turns=(ScriptedReply(say="0"), ScriptedReply(say="I take door 1."), ScriptedReply(say="2"))),)
)
WAYS = ("down", "down", "right", "right", "swim", "down", "right")
LAKE = Script(rules=(Rule(turns=tuple(ScriptedReply(say=way) for way in WAYS)),))
WORDS = Script(
    rules=(
        Rule(when="drawer", turns=(ScriptedReply(say="reward"),)),
        Rule(when="stressed", turns=(ScriptedReply(say="stress"), ScriptedReply(say='{"word": "desserts"}'))),
    )
)
COUNTS = Script(
    rules=(
        Rule(
            when="add 1 then add 2",
            turns=(
                ScriptedReply(call=(ToolUse("increment_counter", {"count": 1}),)),
                ScriptedReply(call=(ToolUse("increment_counter", {"count": 2}), ToolUse("get_counter_value", {}))),
                ScriptedReply(say="The count is 6."),
            ),
        ),
        Rule(
            when="add 4 then add 5",
            turns=(
                ScriptedReply(call=(ToolUse("increment_counter", {"count": 4}),)),
                ScriptedReply(call=(ToolUse("add_to_counter", {"count": 5}),)),
                ScriptedReply(say="The count is 15."),
            ),
        ),
    )
)
"""Of the second task the model calls a tool that is not there, and says what is not so."""
ASK = """
import json, os, sys, urllib.request as u
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)).read()
print("The answer is 4, Paris, Lima, and everything else.")
"""
"""An agent that says something else than its model said."""

CASES = {
    "verifiers": Case("verifiers:verifiers/capitals.py", "verifiers-0.4.0", CAPITALS, {"France": 1.0, "Peru": 0.75}),
    "inspect": Case("inspect:inspect/arithmetic.py@sums", "environments-1", SUMS, {"2+2": 1.0, "17+25": 0.0}),
    "gymnasium": Case("gymnasium:gymnasium/doors.py@Doors", "environments-1", DOORS, {"seed-0": 1.0, "seed-1": 0.9}),
    "frozen lake": Case(
        "gymnasium:FrozenLake-v1",
        "environments-1",
        LAKE,
        {"seed-0": 1.0, "seed-1": 1.0},
        {"make": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]},
    ),
    "openenv": Case("openenv:openenv/echo.py@Backwards", "openenv-0.10.0", WORDS, {"seed-0": 1.0, "seed-1": 0.5}),
    "nemo-gym": Case("nemo-gym:example_session_state_mgmt", "python-3.12", COUNTS, {"0": 1.0, "1": 0.0}),
    "verifiers, by an agent": Case(
        "verifiers:verifiers/capitals.py", "verifiers-0.4.0", CAPITALS, {"France": 1.0, "Peru": 0.75}, harness="command"
    ),
    "inspect, by an agent": Case(
        "inspect:inspect/arithmetic.py@sums", "environments-1", SUMS, {"2+2": 1.0, "17+25": 0.0}, harness="command"
    ),
}


async def play(case: Case, folder: Path) -> tuple[dict[str, Rollout], dict[str, str]]:
    """Each task's rollout, and the text of its session, by the task's own name."""
    options = SourceOptions(python=python_of(case.environment), arguments=case.arguments, take=len(case.rewards))
    async with house(case.script, folder) as home:
        argv = ("python3", "-c", ASK) if case.harness else ()  # the sandbox has no Python of ours
        defaults = Defaults(base=HERE, harness=case.harness, argv=argv, workspaces=home.workspaces)
        tasks = [resolve_paths(task, defaults) for task in await asyncio.to_thread(tasks_of, case.target, options)]
        assert len(tasks) == len(case.rewards)
        await home.client.submit(SubmitTasks(case.policy, 1, tasks, id="s"))
        settings = NodeSettings("n", wait=0.1)
        await NodeAgent(home.client, settings, defaults).run(asyncio.Event(), until_idle=True)
        groups = await home.client.submission_groups("s")
        rollouts = {group.task_id.rpartition("/")[2]: group.rollouts[0] for group in groups}
        paths = {name: f"/read/sessions/{rollout.session_id}/transcript" for name, rollout in rollouts.items()}
        return rollouts, {name: json.dumps(await home.client.get(path)) for name, path in paths.items()}


@pytest.mark.parametrize("name", CASES)
async def test_an_environment_is_paid_by_its_own_scorer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    case = CASES[name]
    rollouts, texts = await play(case, tmp_path)
    told = {task: (rollout.status, rollout.reason) for task, rollout in rollouts.items()}
    assert told == dict.fromkeys(case.rewards, ("succeeded", "")), rollouts
    rewards = {task: rollout.rewards[0].value for task, rollout in rollouts.items()}
    assert rewards == pytest.approx(case.rewards)
    assert all('"reply"' in text for text in texts.values()), "every word of the model is on record"


async def test_a_models_command_beside_the_scorer_forges_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's own tool runs what the model says, within the sandbox where the scorer runs."""
    monkeypatch.chdir(HERE)
    turns = (ScriptedReply(call=(ToolUse("shell", {"command": FORGE}),)), ScriptedReply(say="It is five."))
    case = Case("inspect:inspect/arithmetic.py@tools", "environments-1", Script(rules=(Rule(turns=turns),)), {"2+2": 0})
    rollouts, texts = await play(case, tmp_path)
    assert (rollouts["2+2"].status, rollouts["2+2"].rewards[0].value) == ("succeeded", 0.0)
    assert "SCORER" in texts["2+2"], "the command ran beside it"
    assert "READ ITS" not in texts["2+2"]


async def test_a_model_calls_the_tools_of_a_nemo_gym_server_and_none_of_its_other_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    turns = (
        ScriptedReply(call=(ToolUse("increment_counter", {"count": 1}),)),
        ScriptedReply(call=(ToolUse("seed_session", {"initial_count": 100}), ToolUse("verify", {}))),
        ScriptedReply(call=(ToolUse("increment_counter", {"count": 2}),)),
        ScriptedReply(say="The count is 6."),
    )
    script = Script(rules=(Rule(turns=turns),))
    case = Case("nemo-gym:example_session_state_mgmt", "python-3.12", script, {"0": 1.0})
    rollouts, texts = await play(case, tmp_path)
    assert (rollouts["0"].status, rollouts["0"].rewards[0].value) == ("succeeded", 1.0)
    assert "Not Found" in texts["0"]


async def test_a_nemo_gym_server_scores_an_agents_answer_and_no_policy_is_its_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    case = Case("nemo-gym:nemo_gym/capitals.py", "python-3.12", CAPITALS, {"0": 0.5, "1": 0.0}, harness="command")
    rollouts, texts = await play(case, tmp_path)
    assert (rollouts["0"].status, rollouts["0"].rewards[0].value) == ("succeeded", 0.5)
    assert (rollouts["1"].status, rollouts["1"].scoring) == (
        "failed",
        "masked",
    )  # its answer decides who is asked
    assert [reward.value for reward in rollouts["1"].rewards] == [0.0]
    assert "the server asks a judge or another server, policy_model" in rollouts["1"].reason
    assert "Is that right?" not in texts["1"]
