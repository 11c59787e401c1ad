"""What the task's tests use is the task's: modules with their assertions, and installed tools that they start."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from rolltap.harnesses.base import Ending, Evidence, Exit, Limits, Verdict, Workspace
from rolltap.harnesses.evaluators.intake import Intake, StartingState, is_of_tests
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import UNPROTECTED, Task

from ..plain_python import plain_python

TESTS = "tests/test_calc.py"
WRONG, RIGHT = "def add(a, b): return a - b\n", "def add(a, b): return a + b\n"
OF_TESTS = (
    *("unit_tests", "unittests", "functional-tests", "test_support", "testutils", "testlib", "testing_helpers"),
    *("tests_common", "test-data", "e2e_tests", "TestSuite", "testcases", "doctests", "tests2"),
)
OWN = ("latest", "contest", "protest", "attestation", "fastest_path", "inspector", "testimony", "testament", "greatest")


async def judged(source: Mapping[str, str], left: Mapping[str, str], folder: Path) -> tuple[Verdict, str]:
    runtime, made = ProcessRuntime(folder / "places"), list[Workspace]()

    async def prepare() -> Workspace:
        made.append(await runtime.prepare(Files(dict(source))))
        return made[-1]

    agents = await prepare()
    Files(dict(left))(agents.folder)
    evidence = Evidence(Task("t", "x"), Exit(Ending.DONE, 1.0, 0), agents, prepare, Limits(evaluate_s=110))
    try:
        return await PytestCheck((TESTS,), python=plain_python()).evaluate(evidence), str(evidence.seen)
    finally:
        for each in made:
            await each.close()


def test_names_of_what_tests_use() -> None:
    for name in OF_TESTS:
        for path in (f"{name}/helpers.py", f"src/{name}/a/b.py", f"{name}.py", f"src/{name}.py"):
            assert is_of_tests(path), path
            assert not Intake(StartingState(frozenset((path,)), frozenset(), frozenset(), {})).brings(path)
    for name in OWN:
        assert not is_of_tests(f"src/{name}/{name}.py"), name


async def test_an_agent_changes_no_assertion_that_tests_use(tmp_path: Path) -> None:
    module = random.choice(OF_TESTS[:9]).replace("-", "_")
    helper = random.choice((f"{module}.py", f"{module}/helpers.py"))
    source = {
        "calc.py": WRONG,
        helper: "def check(value, expected):\n    assert value == expected\n",
        TESTS: f"from {helper[:-3].replace('/', '.')} import check\nfrom calc import add\n\n"
        "def test_add():\n    check(add(2, 3), 5)\n",
    }
    verdict, seen = await judged(source, {helper: "def check(*_): pass\n"}, tmp_path)
    assert verdict.scores[0].value == 0.0, seen
    assert verdict.detail["dropped_test_changes"] == [helper]
    verdict, seen = await judged(source, {"calc.py": RIGHT}, tmp_path)
    assert verdict.scores[0].value == 1.0, seen


@pytest.mark.parametrize("also", ["", "    assert add(0, 0) == 0\n"])
async def test_tests_that_assert_nothing_themselves_are_not_trusted(also: str, tmp_path: Path) -> None:
    """Their assertions are a file's that an agent may change, as its name says nothing."""
    name = random.choice(("check", "assert_sum", "expect"))
    source = {
        "calc.py": WRONG,
        "checks/common.py": f"def {name}(value, expected):\n    assert value == expected\n",
        TESTS: f"from checks.common import {name}\nfrom calc import add\n\n"
        f"def test_add():\n    {name}(add(2, 3), 5)\n{also}",
    }
    verdict, seen = await judged(source, {"checks/common.py": f"def {name}(*_): pass\n"}, tmp_path)
    assert verdict.scores[0].value == 1.0, seen
    assert (UNPROTECTED in verdict.detail) == (not also)


STARTS = """\
import subprocess, sys

def test_add():
    assert subprocess.run([sys.executable, "-m", "pytest", "-q", "cases.py"]).returncode == 0

def test_new():
    import fresh
    assert fresh.VALUE == 3
"""


@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py", "{}/__main__.py"])
async def test_no_new_module_is_an_installed_one_for_a_python_that_a_test_starts(form: str, tmp_path: Path) -> None:
    name = "pytest" if "main" in form else random.choice(("pytest", "pluggy", "iniconfig", "packaging"))
    source = {
        "calc.py": WRONG,
        "cases.py": "from calc import add\n\ndef test_add():\n    assert add(2, 3) == 5\n",
        TESTS: STARTS,
    }
    evil = {form.format(name): "import os\nos._exit(0)\n"}
    if "main" in form:
        evil[f"{name}/__init__.py"] = ""
    verdict, seen = await judged(source, {**evil, "fresh.py": "VALUE = 3\n"}, tmp_path)
    assert verdict.scores[0].value == 0.0, seen
    assert verdict.detail["dropped_test_changes"] == sorted(evil)
    verdict, seen = await judged(source, {"calc.py": RIGHT, "fresh.py": "VALUE = 3\n"}, tmp_path)
    assert verdict.scores[0].value == 1.0, seen
