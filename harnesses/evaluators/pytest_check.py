"""The `pytest` evaluator: runs the tests that must pass, in a workspace without access for the agent.

Only the agent's changes are copied into that clean workspace. Changes to test files are dropped and counted. Then the
task's test patch is applied and the tests run. The reward is 1.0 if every named test passed, else 0.0; the detail lists
the passed and the failed tests.
"""

from __future__ import annotations

import asyncio
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from rolltap.errors import EvaluatorFailed
from rolltap.harnesses.base import Command, Ending, Evidence, Score, Verdict, Workspace
from rolltap.harnesses.changes import TEST_FILES, Change, apply_changes, changes
from rolltap.harnesses.evaluators.base import EvaluatorTable
from rolltap.harnesses.output import last_line
from rolltap.harnesses.untrusted import read_untrusted

REPORT = "junit.xml"
PATCH = "test.patch"
"""Both are in the clean workspace's HOME, where the agent can't create links."""

NAMED_CHANGES = 100
"""The most files that a reward's detail names. The evaluation's output names them all."""

MISSING_PLUGIN = re.compile(r'Error importing plugin "([^"\n]{1,100})"')

RUN_PYTEST = """\
import os, sys
import pytest

class WorkingCopy:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.path.insert(0, os.getcwd())

sys.exit(pytest.main(sys.argv[1:], plugins=[WorkingCopy()]))
"""
"""`python -m pytest`, except that pytest and its plugins are imported before the agent's folder is on the path."""


class PytestCheck(EvaluatorTable, tag="pytest", frozen=True):
    """`must_pass` and `keep_passing` are pytest node ids; a file means all its tests. `python` runs them.

    Raises `ValueError` if neither names a test: without one every run would be rewarded.
    """

    example = '{"kind": "pytest", "must_pass": ["tests/test_calc.py"]}'

    must_pass: tuple[str, ...]
    keep_passing: tuple[str, ...] = ()
    test_patch: str = ""
    python: str = "python3"

    def __post_init__(self) -> None:
        if not self.must_pass and not self.keep_passing:
            raise ValueError("`must_pass` and `keep_passing` name no test")

    @property
    def needs_clean_workspace(self) -> bool:
        return True

    @property
    def needs(self) -> tuple[Path, ...]:
        """The folders of an absolute `python`: its virtual environment, and its interpreter's prefix."""
        if not Path(self.python).is_absolute():
            return ()
        prefixes = (path.parent.parent for path in (Path(self.python), Path(self.python).resolve()))
        return tuple(dict.fromkeys(prefix for prefix in prefixes if _is_python_prefix(prefix)))

    async def evaluate(self, evidence: Evidence) -> Verdict:
        clean = await evidence.clean_workspace()
        all_changes, dropped = await asyncio.to_thread(self._copy_changes, evidence.workspace.folder, clean.folder)
        lines = [f"{each.kind.value} {each.path}{' (dropped)' if each in dropped else ''}" for each in all_changes]
        evidence.seen.add("the agent's changes", "\n".join(lines))
        if self.test_patch:
            await self._apply_patch(clean, evidence)
        tests = (*self.must_pass, *self.keep_passing)
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={clean.home / REPORT}", "-o", "junit_family=xunit1")
        files = dict.fromkeys(test.split("[")[0] for test in tests)
        launch = Command((self.python, "-I", "-B", "-c", RUN_PYTEST, *options, *files))
        exit_ = await evidence.run(clean, "the tests", launch)
        results = await read_untrusted(read_report, clean.home_folder / REPORT, exit_.output)
        passed = {test: _test_passed(test, results) for test in tests}
        detail = {
            "passed": [test for test, ok in passed.items() if ok],
            "failed": [test for test, ok in passed.items() if not ok],
            "changed": len(all_changes),
            "dropped_test_changes": [change.path for change in dropped[:NAMED_CHANGES]],
        }
        return Verdict((Score(float(all(passed.values()))),), detail)

    def _copy_changes(self, agent: Path, clean: Path) -> tuple[list[Change], list[Change]]:
        """Applies the agent's changes to the clean folder. Returns all changes, and those that were dropped."""
        all_changes = changes(clean, agent)
        return all_changes, apply_changes(all_changes, agent, clean, TEST_FILES)

    async def _apply_patch(self, workspace: Workspace, evidence: Evidence) -> None:
        launch = Command(
            ("git", "apply", "--whitespace=nowarn", str(workspace.home / PATCH)), files={PATCH: self.test_patch}
        )
        exit_ = await evidence.run(workspace, "git apply", launch)
        if exit_.ending is not Ending.DONE:
            raise EvaluatorFailed(f"the test patch does not apply: {last_line(exit_.output)}")


def read_report(path: Path, output: str) -> dict[str, bool]:
    """Node id → passed, from a JUnit report of family xunit1. A skipped test has not passed.

    Raises `EvaluatorFailed` if the report is missing or can't be read.
    """
    if path.is_symlink() or not path.is_file():
        if plugin := MISSING_PLUGIN.search(output):
            raise EvaluatorFailed(
                f"pytest's settings in the repository load a plugin, {plugin[1]!r}, that is not installed: plugins are "
                "imported before the agent's folder is on the path; install it for `python`, or drop it from addopts"
            )
        raise EvaluatorFailed(f"pytest wrote no report: {last_line(output)}")
    try:
        cases = list(ET.parse(path).iter("testcase"))
    except ET.ParseError as error:
        raise EvaluatorFailed(f"pytest's report can't be read: {error}") from error
    results: dict[str, bool] = {}
    for case in cases:
        file = case.get("file", "")
        inner = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        node = "::".join(part for part in (file, inner.replace(".", "::"), case.get("name", "")) if part)
        ok = not any(child.tag in ("failure", "error", "skipped") for child in case)
        results[node] = results.get(node, True) and ok
    return results


def _test_passed(test: str, results: dict[str, bool]) -> bool:
    """True if `test` ran and passed; a file, class or unparametrised function means all tests below it."""
    outcomes = [ok for node, ok in results.items() if node == test or node.startswith((f"{test}::", f"{test}["))]
    return bool(outcomes) and all(outcomes)


def _is_python_prefix(folder: Path) -> bool:
    """True if `folder` belongs only to one Python, so that mounting it exposes nothing else."""
    return folder != Path("/") and ((folder / "pyvenv.cfg").is_file() or any(folder.glob("lib/python3*/os.py")))
