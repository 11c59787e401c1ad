"""An agent that makes its own evaluation fail is worth 0 and counted: it does not choose to be left out.

Each case is a whole rollout. `BREAKERS` have what an agent leaves for evaluators that judge the task's own files; in
`BROKEN` are evaluators that judge nothing at all, whose failure is nobody's reward.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rolltap.harnesses.base import Command, Job, Launch, Limits
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.evaluators.registry import parse_evaluator
from rolltap.harnesses.runner.attempts import run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import Task

from ..plain_python import plain_python
from ..unit.harnesses.stub import Stub, running, tool_call

START = {"answer.txt": "0\n", "grade": "#!/bin/sh\ntest $(cat answer.txt) -eq 42\n", "data.json": '{"answer": 0}'}
CHECKS = """\
import json, re, time

def reads(folder):
    return float(json.loads((folder / "data.json").read_text())["answer"] == 42)

def matches(folder):
    return float(bool(re.fullmatch(r"(0|00)+42", (folder / "answer.txt").read_text().strip())))

def fills(folder):
    return float(len(b"x" * int((folder / "answer.txt").read_text())) == 42)

def odd(folder):
    return float((folder / "answer.txt").read_text())

def broken(folder):
    raise KeyError("always")

def ends(folder):
    import os
    os._exit(3)

def missing(folder):
    return float((folder / "made.txt").read_text())
"""
PYTHON = {"kind": "python"}
TEST_SH = "cp answer.txt /logs/verifier/reward.txt\n"
BREAKERS: Mapping[str, tuple[dict[str, Any], str]] = {
    "not JSON": ({**PYTHON, "callable": "checks.py:reads"}, "echo '{' > data.json"),
    "another type": ({**PYTHON, "callable": "checks.py:reads"}, "echo '[1]' > data.json"),
    "no text": ({**PYTHON, "callable": "checks.py:reads"}, "printf '\\377' > data.json"),
    "gone": ({**PYTHON, "callable": "checks.py:reads"}, "rm data.json"),
    "a folder": ({**PYTHON, "callable": "checks.py:reads"}, "rm data.json; mkdir data.json"),
    "deep JSON": ({**PYTHON, "callable": "checks.py:reads"}, "head -c 200000 /dev/zero | tr '\\0' '[' > data.json"),
    "a slow pattern": ({**PYTHON, "callable": "checks.py:matches"}, "printf '%060dx' 0 > answer.txt"),
    "memory": ({**PYTHON, "callable": "checks.py:fills"}, "echo 3000000000 > answer.txt"),
    "no number": ({**PYTHON, "callable": "checks.py:odd"}, "echo nan > answer.txt"),
    "no program": ({"kind": "command", "command": "sh ./grade || exit $?; ./grade"}, "rm grade; mkdir grade"),
    "no rights": ({"kind": "command", "command": "cp grade /tmp/g; chmod +x /tmp/g; /tmp/g && ./grade"}, "rm grade"),
    "time": ({"kind": "command", "command": "sleep $(cat answer.txt); false"}, "echo 600 > answer.txt"),
    "a signal": ({"kind": "command", "command": "kill -$(cat answer.txt) $$; false"}, "echo 9 > answer.txt"),
    "a reward": ({"kind": "command", "command": "cp answer.txt out", "reward_file": "out"}, "echo lots > answer.txt"),
    "a reward of Harbor": ({"kind": "harbor", "tests": "tests"}, "echo lots > answer.txt"),
}
"""What the agent runs, by the evaluator that fails on it."""
SILENT: Mapping[str, dict[str, Any]] = {
    "python": {**PYTHON, "callable": "checks.py:broken"},
    "python, a file that no one made": {**PYTHON, "callable": "checks.py:missing"},
    "python, a process that ends": {**PYTHON, "callable": "checks.py:ends"},
    "command": {"kind": "command", "command": "cp made.txt out", "reward_file": "out"},
    "command, no number": {"kind": "command", "command": "cat made.txt > out", "reward_file": "out"},
    "harbor": {"kind": "harbor", "tests": "silent"},
}
"""They give undone work no reward: who leaves the work undone is not to be left out of the baseline."""
BROKEN: Mapping[str, dict[str, Any]] = {
    "command": {"kind": "command", "command": "nosuch"},
    "time": {"kind": "command", "command": "sleep 600"},
}


class Shell:
    name, package, dialect, quirks = "shell", None, "openai_chat", ()

    def __init__(self, command: str) -> None:
        self.command = command

    def launch(self, job: Job) -> Launch:
        return Command(("/bin/bash", "-c", self.command))


@pytest.fixture
async def server() -> AsyncIterator[Stub]:
    async with running(Stub(lambda messages: tool_call("true"))) as stub:
        yield stub


async def ended(
    server: Stub,
    table: dict[str, Any],
    command: str,
    folder: Path,
    start: Mapping[str, str] = START,
    evaluate_s: float = 60,
) -> tuple[dict[str, Any], list[float]]:
    """The report of a rollout whose agent runs `command`, and its rewards."""
    Files({"checks.py": CHECKS, "tests/test.sh": TEST_SH, "silent/test.sh": "true\n"})(folder / "task")
    is_slow = "sleep" in str(table) or "matches" in str(table)
    limits = Limits(agent_s=60, evaluate_s=6 if is_slow else evaluate_s, memory_mb=600)
    shown = PytestCheck(("t",), python=plain_python()).needs if table["kind"] == "pytest" else ()
    runtime = BubblewrapRuntime(folder / "places", shown=tuple(shown))
    async with AdminClient(server.url, "admin") as client:
        evaluator = parse_evaluator(table).resolve_paths(folder / "task").build(client)
        job = Assignment(Task("t", "Write 42."), Files(start), Shell(command), runtime, evaluator, limits)
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    assert list((folder / "places").iterdir()) == []
    (body,) = server.finished.values()
    return body, [reward["value"] for reward in server.rewards]


async def test_honest_work_whose_tests_take_most_of_the_time_is_paid(server: Stub, tmp_path: Path) -> None:
    """Its tests run twice, the second time as decoys."""
    tests = "import time, calc\n\ndef test_add():\n    time.sleep(10)\n    assert calc.add(1, 2) == 3\n"
    task = {"calc.py": "def add(a, b): return 0\n", "test_calc.py": tests}
    table = {"kind": "pytest", "must_pass": ["test_calc.py"], "python": plain_python()}
    command = "echo 'def add(a, b): return a + b' > calc.py"
    body, rewards = await ended(server, table, command, tmp_path, task, evaluate_s=17)
    assert (body["status"], rewards, body.get("tampering") or []) == ("succeeded", [1.0], []), body


@pytest.mark.parametrize("name", BREAKERS)
async def test_who_breaks_its_evaluation_gets_nothing_and_is_counted(name: str, server: Stub, tmp_path: Path) -> None:
    table, command = BREAKERS[name]
    body, rewards = await ended(server, table, command, tmp_path)
    assert (body["status"], rewards) == ("succeeded", [0.0]), body
    assert [act["kind"] for act in body["tampering"]] == ["unreadable"], body


@pytest.mark.parametrize("name", BROKEN)
async def test_an_evaluator_that_judges_nothing_gives_no_reward(name: str, server: Stub, tmp_path: Path) -> None:
    body, rewards = await ended(server, BROKEN[name], "true", tmp_path)
    assert (body["status"], body["cause"], rewards) == ("failed", "evaluation", []), body
    assert list(body.get("tampering", ())) == []


@pytest.mark.parametrize("name", SILENT)
async def test_work_without_a_reward_counts_nothing_in_the_baseline(name: str, server: Stub, tmp_path: Path) -> None:
    body, rewards = await ended(server, SILENT[name], "true", tmp_path)
    assert (body["status"], body["cause"], body["scoring"], rewards) == ("failed", "evaluation", "masked", [0.0]), body
    assert list(body.get("tampering", ())) == []


@pytest.mark.parametrize("name", BREAKERS)
async def test_an_agent_that_changes_nothing_is_judged(name: str, server: Stub, tmp_path: Path) -> None:
    """So that the failures above are the agents' doing."""
    body, rewards = await ended(server, BREAKERS[name][0], "true", tmp_path)
    assert (body["status"], rewards) == ("succeeded", [0.0]), body
    assert list(body.get("tampering", ())) == []
