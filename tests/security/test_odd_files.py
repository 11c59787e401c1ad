"""Odd files in every place that is read after an agent ran, before every evaluator that looks at files.

Each case is a whole rollout of `odd_files.py` with a random seed, which a failure names: no reward, no word of the
machine's own in the report, no failure of the infrastructure, nothing left, and the runner is never late.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolltap.harnesses.base import Command, Evaluator, Job, Launch, Limits, RuntimeOptions
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.evaluators.python_check import PythonCheck
from rolltap.harnesses.runner.attempts import run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runtimes.bubblewrap import INTERPRETER
from rolltap.harnesses.runtimes.registry import runtime_class
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import Task

from ..plain_python import plain_python
from ..unit.harnesses.stub import Stub, running, tool_call
from . import odd_files
from .test_left_files import LATE_S, Pulse

SECRET = "hush-of-the-machine"
PROJECT = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": "from calc import add\n\ndef test_two():\n    assert add(1, 1) == 2\n",
}
LOOKS = (
    "cat calc.py answer.txt; $ROLLTAP_SANDBOXED python3 calc.py; "
    "grep -qs 'a + b' calc.py && echo 1 > {0} || echo 0 > {0}"
)


class OddAgent:
    package, dialect, quirks, name = None, "openai_chat", (), "codex"

    def __init__(self, seed: int, secret: Path) -> None:
        self.seed, self.secret = seed, secret

    def launch(self, job: Job) -> Launch:
        return Command((INTERPRETER, "-c", inspect.getsource(odd_files), str(self.seed), str(self.secret)))


def evaluators(folder: Path) -> dict[str, Evaluator]:
    Files({"test.sh": f"cd /workspace\n{LOOKS.format('/logs/verifier/reward.txt')}\n"})(folder)
    return {
        "command": CommandCheck(f"set +o pipefail; {LOOKS.format('out/reward.txt')}", "out/reward.txt"),
        "exit code": CommandCheck("grep -qs 'a + b' calc.py", reads_only=True),
        "takes": CommandCheck("grep -qs 'a + b' calc.py", takes=("calc.py", "tests/*", "a/*", "out/*")),
        "pytest": PytestCheck(("tests/test_calc.py",), python=plain_python()),
        "harbor": HarborCheck(str(folder)),
        "python": PythonCheck(lambda work: float("a + b" in (work / "calc.py").read_text())),
    }


@pytest.fixture
async def server() -> AsyncIterator[Stub]:
    async with running(Stub(lambda messages: tool_call("true"))) as stub:
        yield stub


NAMES = ("command", "exit code", "takes", "pytest", "harbor", "python")


@pytest.mark.parametrize("runtime", ["bubblewrap", pytest.param("process", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
async def test_odd_files_gain_nothing_and_break_nothing(name: str, runtime: str, server: Stub, tmp_path: Path) -> None:
    (secret := tmp_path / "secret/file").parent.mkdir()
    secret.write_text(SECRET)
    evaluator = evaluators(tmp_path / "tests")[name]
    seed, places = random.randrange(10**9), tmp_path / "places"
    needs = PytestCheck(("t",), python=plain_python()).needs
    made = runtime_class(runtime).create(RuntimeOptions(places, needs=needs))
    agent, limits = OddAgent(seed, secret), Limits(agent_s=60, evaluate_s=20)
    job = Assignment(Task("t", "Work."), Files(PROJECT), agent, made, evaluator, limits)
    pulse = Pulse()
    beating = asyncio.create_task(pulse.beat())
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    beating.cancel()
    (body,) = server.finished.values()
    said = f"seed {seed}: {body}"
    assert body.get("cause") in (None, "agent", "evaluation"), said
    assert not any(server.failures.values()), said
    assert all(reward["value"] == 0.0 for reward in server.rewards), said
    if runtime != "process":
        assert SECRET not in str(body) + str(server.rewards), said
    assert list(places.iterdir()) == [], said
    assert secret.read_text() == SECRET, said
    assert pulse.late < LATE_S, said
