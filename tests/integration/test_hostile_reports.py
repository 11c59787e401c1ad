"""An agent that fails its task and makes its report hard to store does not escape its reward."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from rolltap.engine.scripted import Script, ScriptedReply
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.base import KEPT_BYTES, REPORTED_BYTES, Evaluator, Evidence, Score, Verdict
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.runner.attempts import run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import Task

from ..harnesses.house import POLICY, House, house
from ..plain_python import plain_python
from .test_runner import CURL

FAILS = CommandCheck(command="cat out 2>/dev/null; false")
TESTS = PytestCheck(must_pass=("test_x.py",), python=plain_python())
NUL = "printf 'x\\0y\\n'"
BAD_NAME = "touch \"$(printf 'x\\377')\""
MANY_TESTS = "for n in $(seq 1200); do : > test_of_the_agent_that_nobody_asked_for_and_that_has_a_long_name_$n.py; done"


class Details:
    """An evaluator whose detail quotes the agent."""

    name, needs_clean_workspace, reward_files = "details", False, ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        return Verdict((Score(0.0, detail={"nul": "\0", "half": "\ud800", "huge": 2**70, "nan": float("nan")}),), {})


@dataclass
class Long:
    """An evaluator of many steps, each with as much output as is kept."""

    character: str
    name, needs_clean_workspace, reward_files = "long", False, ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        for step in range(9):
            evidence.seen.add(f"step {step}", self.character * KEPT_BYTES)
        assert len(json.dumps(str(evidence.seen))) <= REPORTED_BYTES
        assert "step 0" in str(evidence.seen)
        return Verdict((Score(0.0),), {})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with house(Script(otherwise=ScriptedReply(say="Hello.")), tmp_path_factory.mktemp("house")) as home:
        yield home


async def rewarded(home: House, tmp_path: Path, shell: str, evaluator: Evaluator) -> list[float]:
    """The stored rewards of a rollout that has ended as if its report were any other's. Its agent calls once: a rollout
    without a call has failed."""
    assignment = Assignment(
        Task("t", "hi"),
        Files({"test_x.py": "def test_a():\n    assert 0\n"}),
        AnyCommand(("/bin/sh", "-c", f"/usr/bin/python3 -c '{CURL}' > /dev/null; {shell}")),
        ProcessRuntime(tmp_path / "workspaces"),
        evaluator,
    )
    (group,) = await run_groups(RolloutRunner(home.client), [assignment], policy=POLICY, n=1)
    stored = await home.client.get(f"/read/groups/{group.group_id}")
    (rollout,) = (each["rollout"] for each in stored["rollouts"])
    assert (stored["line"]["status"], rollout["status"]) != ("open", "running")
    assert rollout["scoring"] == ("unscorable" if rollout["status"] == "failed" else "scored"), rollout["reason"]
    return [reward["value"] for reward in rollout["rewards"]]


@pytest.mark.parametrize(
    ("shell", "evaluator"),
    [
        (f"{NUL}; exit 1", FAILS),
        (f"{NUL} > out", FAILS),
        (BAD_NAME, TESTS),
        (MANY_TESTS, TESTS),
        ("true", Details()),
    ],
    ids=["last-line", "evaluator-output", "file-name", "many-tests", "detail"],
)
async def test_text_that_no_store_can_hold_does_not_save_a_failure(
    home: House, tmp_path: Path, shell: str, evaluator: Evaluator
) -> None:
    assert await rewarded(home, tmp_path, shell, evaluator) == [0.0]


CALLS = {
    "a NUL": '[{"tool_call_id": "a\\0b"}]',
    "half a pair": '[{"tool_call_id": "\\ud800"}]',
    "another type": "[5, {}]",
    "very many": "[{}] * 1000",
    "long": '[{"tool_call_id": "x" * 257}]',
}
LOG = "import json; json.dump(dict(schema_version='ATIF-1', steps=[dict(source='agent', tool_calls={calls})] * 1200), open('trajectory.json', 'w'))"  # noqa: E501


@pytest.mark.parametrize("calls", CALLS)
async def test_a_log_that_the_server_refuses_does_not_save_a_failure(home: House, tmp_path: Path, calls: str) -> None:
    script = tmp_path / "log.py"
    script.write_text(LOG.format(calls=CALLS[calls]))
    assert await rewarded(home, tmp_path, f"/usr/bin/python3 {script}", FAILS) == [0.0]


@pytest.mark.parametrize("character", ["\1", "\ufffd", "\U0001f600", "x"])
async def test_a_long_evaluation_does_not_save_a_failure(home: House, tmp_path: Path, character: str) -> None:
    """Nor does it keep what was found out of the record."""
    assert await rewarded(home, tmp_path, "true", Long(character)) == [0.0]


async def test_a_report_that_is_refused_all_the_same_ends_its_rollout(
    home: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltap.harnesses.base.storable", lambda text: text)
    assert await rewarded(home, tmp_path, f"{NUL} > out", FAILS) == [0.0]
