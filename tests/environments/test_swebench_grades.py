"""Instances of the SWE-bench family: our reward is what SWE-bench's own grading makes of the same tests' log."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rolltap.harnesses.base import Ending, Evidence, Exit, Limits, Workspace
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import Task

from ..conftest import ROOT

GRADE = """
import json, sys
from swebench.harness.grading import get_eval_tests_report, get_resolution_status
from swebench.harness.log_parsers.python import parse_log_pytest
job = json.load(sys.stdin)
for log in job["logs"]:
    print(get_resolution_status(get_eval_tests_report(parse_log_pytest(log, None), job["gold"])))
"""
OLD_TESTS = "from calc import add\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
NEW_TESTS = OLD_TESTS + "\ndef test_two():\n    assert add(1, 1) == 2\n"
PATCH = """--- a/test_calc.py
+++ b/test_calc.py
@@ -2,3 +2,6 @@

 def test_zero():
     assert add(0, 0) == 0
+
+def test_two():
+    assert add(1, 1) == 2
"""
BASE = {"calc.py": "def add(a, b):\n    return a - b\n", "test_calc.py": OLD_TESTS}
ATTEMPTS: Mapping[str, Mapping[str, str]] = {
    "nothing": {},
    "solved": {"calc.py": "def add(a, b):\n    return a + b\n"},
    "solved by half": {"calc.py": "def add(a, b):\n    return 2\n"},
    "tests emptied": {"test_calc.py": "def test_zero(): pass\ndef test_two(): pass\n"},
}
GOLD = {"FAIL_TO_PASS": ["test_calc.py::test_two"], "PASS_TO_PASS": ["test_calc.py::test_zero"]}


async def reward_of(attempt: Mapping[str, str], folder: Path) -> float:
    runtime = ProcessRuntime(folder)
    agent, clean = await runtime.prepare(Files({**BASE, **attempt})), list[Workspace]()

    async def clean_workspace() -> Workspace:
        clean.append(await runtime.prepare(Files(BASE)))
        return clean[-1]

    check = PytestCheck(tuple(GOLD["FAIL_TO_PASS"]), tuple(GOLD["PASS_TO_PASS"]), PATCH, sys.executable)
    evidence = Evidence(Task("t", "Mend add."), Exit(Ending.DONE, 1.0, 0), agent, clean_workspace, Limits())
    try:
        return (await check.evaluate(evidence)).scores[0].value
    finally:
        for workspace in (agent, *clean):
            await workspace.close()


def log_of(attempt: Mapping[str, str], folder: Path) -> str:
    """What the tests print where SWE-bench runs them: on the attempt's product code, with the test patch's files."""
    folder.mkdir()
    Files({**BASE, **attempt, "test_calc.py": NEW_TESTS})(folder)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_calc.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def resolutions(logs: Sequence[str]) -> list[str]:
    """What SWE-bench's grading calls each log."""
    python = ROOT / ".cache" / "trainers" / "environments-1" / "bin" / "python"
    job = json.dumps({"logs": logs, "gold": GOLD})
    graded = subprocess.run([str(python), "-c", GRADE], input=job, capture_output=True, text=True, timeout=300)
    assert graded.returncode == 0, graded.stderr[-2000:]
    return graded.stdout.split()


@pytest.mark.trainers
@pytest.mark.timeout(600)
async def test_our_reward_is_swe_benchs_resolution(tmp_path: Path) -> None:
    rewards = {name: await reward_of(attempt, tmp_path / "workspaces") for name, attempt in ATTEMPTS.items()}
    logs = [log_of(attempt, tmp_path / str(number)) for number, attempt in enumerate(ATTEMPTS.values())]
    resolved = {name: line == "RESOLVED_FULL" for name, line in zip(ATTEMPTS, resolutions(logs), strict=True)}
    assert resolved == {name: reward == 1.0 for name, reward in rewards.items()}
    assert rewards == {"nothing": 0.0, "solved": 1.0, "solved by half": 0.0, "tests emptied": 0.0}
