"""The `pytest` evaluator: runs the tests that must pass, in a workspace without access for the agent.

The task's test patch is applied to a clean workspace, and then the agent's changes that `intake.py` allows. All others
(to tests, files of the patch and configuration) are dropped and named. The reward is 1.0 if every named test passed,
else 0.0; the detail lists the passed and the failed tests.

A test passed if its call ran and passed, and no part of it failed. Our own plug-in counts; reports of other plug-ins
are ignored. The code under test shares pytest's process, so code that is written against this evaluator can still
make up results; `harnesses/runner/tampering.py` looks for such code.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from rolltap.errors import EvaluatorFailed, Unreadable
from rolltap.harnesses.base import Command, Ending, Evidence, Score, Verdict, Workspace, last_line
from rolltap.harnesses.evaluators.base import CodePlace, EvaluatorTable
from rolltap.harnesses.evaluators.intake import Intake, StartingState
from rolltap.harnesses.evaluators.programs import listed
from rolltap.harnesses.left_files import LeftFiles, apply_changes, changes, read_untrusted

RESULTS = "results.jsonl"
PATCH = "test.patch"
CONFIGURATION = "pytest.ini"
NEW = "new.json"
"""All are in the clean workspace's HOME, where the agent can't create links."""

NAMED_CHANGES = 100
"""The most files that a reward's detail names. The evaluation's output names them all."""

MISSING_PLUGIN = re.compile(r'Error importing plugin "([^"\n]{1,100})"')

GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}

RUN_PYTEST = """\
import json, os, sys
from importlib.machinery import PathFinder
import pytest

WORK = os.path.join(os.getcwd(), "")
with open(sys.argv[2], encoding="utf-8") as file:
    NEW = set(json.load(file))

class Installed:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None and name in NEW:
            outside = [each for each in sys.path if not os.path.join(os.path.abspath(each), "").startswith(WORK)]
            return PathFinder.find_spec(name, outside)

class WorkingCopy:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.path.insert(0, os.getcwd())
        sys.meta_path.insert(0, Installed)

class Results:
    def pytest_sessionstart(self):
        self.file = open(sys.argv[1], "x", encoding="utf-8")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        row = [report.nodeid, report.when, report.outcome, hasattr(report, "wasxfail")]
        self.file.write(json.dumps(row) + "\\n")
        self.file.flush()

sys.exit(pytest.main(sys.argv[3:], plugins=[WorkingCopy(), Results()]))
"""
"""`python -m pytest`, except that pytest and its plugins are imported before the agent's folder is on the path, and no
new module of the agent's takes the place of an installed one."""

SETTINGS = {
    **dict.fromkeys(("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"), ""),
    "pyproject.toml": "[tool.pytest",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
}
"""Files that pytest looks for, in its order, and the section that makes one its configuration."""


class PytestCheck(EvaluatorTable, tag="pytest", frozen=True):
    """`must_pass` and `keep_passing` are pytest node ids; a file means all its tests. `python` runs them. `takes`:
    patterns of the agent's changes that are tested (`intake.py`); () for the allow-list. The files of named tests and
    of the patch are always the task's.

    Raises `ValueError` if neither names a test: without one every run would be rewarded.
    """

    example = '{"kind": "pytest", "must_pass": ["tests/test_calc.py"]}'
    code_place = CodePlace.TESTS

    must_pass: tuple[str, ...]
    keep_passing: tuple[str, ...] = ()
    test_patch: str = ""
    python: str = "python3"
    takes: tuple[str, ...] = ()

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
        tests = (*self.must_pass, *self.keep_passing)
        files = tuple(dict.fromkeys(test.partition("::")[0] for test in tests))
        agents = evidence.workspace.folder
        all_changes = await asyncio.to_thread(changes, clean.folder, agents)
        start = await asyncio.to_thread(StartingState.of, clean.folder)
        patched: Collection[str] = ()
        if self.test_patch:
            before = await asyncio.to_thread(_identities, clean.folder)
            await self._apply_patch(clean, evidence)
            after = await asyncio.to_thread(_identities, clean.folder)
            patched = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        configuration = await asyncio.to_thread(find_configuration, clean.folder, files)
        intake = Intake(start, self.takes, {*files, *patched})
        dropped = await asyncio.to_thread(apply_changes, all_changes, agents, clean.folder, intake.brings_of(agents))
        new = {name for change in all_changes for name in _module_names(change.path) if change.path not in start.files}
        evidence.seen.add("the agent's changes", "\n".join(listed(all_changes, dropped)))
        chosen = clean.workdir / configuration if configuration else clean.home / CONFIGURATION
        options = ("-q", "-p", "no:cacheprovider", "-c", str(chosen), f"--rootdir={clean.workdir}")
        arguments = (
            str(clean.home / RESULTS),
            str(clean.home / NEW),
            *options,
            *dict.fromkeys(test.split("[")[0] for test in tests),
        )
        files_of_home = {CONFIGURATION: "[pytest]\n", NEW: json.dumps(sorted(new))}
        launch = Command((self.python, "-I", "-B", "-c", RUN_PYTEST, *arguments), files=files_of_home)
        exit_ = await evidence.run(clean, "the tests", launch)
        results = await read_untrusted(read_results, clean.home_folder, exit_.output)
        passed = {test: _test_passed(test, results) for test in tests}
        detail = {
            "passed": [test for test, ok in passed.items() if ok],
            "failed": [test for test, ok in passed.items() if not ok],
            "changed": len(all_changes),
            "dropped_test_changes": [change.path for change in dropped[:NAMED_CHANGES]],
        }
        return Verdict((Score(float(all(passed.values()))),), detail)

    async def _apply_patch(self, workspace: Workspace, evidence: Evidence) -> None:
        """Before the agent's changes are there: git obeys what a repository says, and any folder can be one."""
        argv = ("git", "apply", "--whitespace=nowarn", str(workspace.home / PATCH))
        launch = Command(argv, env=GIT, files={PATCH: self.test_patch})
        exit_ = await evidence.run(workspace, "git apply", launch)
        if exit_.ending is not Ending.DONE:
            raise EvaluatorFailed(f"the test patch does not apply: {last_line(exit_.output)}")


def find_configuration(folder: Path, tests: Iterable[str]) -> str:
    """The file of the task with pytest's settings, by path below `folder`: as pytest finds it, from the folder of all
    `tests` upward; "" if there is none."""
    common = PurePosixPath(os.path.commonpath([os.path.dirname(f"./{test}") for test in tests]))
    for place in (common, *common.parents):
        for name, section in SETTINGS.items():
            path = folder / place / name
            if path.is_file() and section in path.read_text(encoding="utf-8", errors="replace"):
                return str(place / name)
    return ""


def read_results(home: Path, output: str) -> dict[str, bool]:
    """Node id → passed: its call ran and passed, and no part of it failed. One that is tried again counts at its end.

    Raises `EvaluatorFailed` if the file is missing, `Unreadable` if it isn't what our plug-in writes: then code of the
    working copy wrote it.
    """
    try:
        file = LeftFiles(home).open(RESULTS)
    except OSError:
        file = None
    if file is None:
        if plugin := MISSING_PLUGIN.search(output):
            raise EvaluatorFailed(
                f"pytest's settings in the repository load a plugin, {plugin[1]!r}, that is not installed: plugins are "
                "imported before the agent's folder is on the path; install it for `python`, or drop it from addopts"
            )
        raise EvaluatorFailed(f"pytest did not begin: {last_line(output)}")
    with file:
        text = file.read().decode("utf-8", errors="replace")
    called: dict[str, bool] = {}
    failed: set[str] = set()
    try:
        for node, when, outcome, expected_to_fail in map(json.loads, text.splitlines()):
            if when == "call" and outcome != "rerun":
                called[node] = called.get(node, True) and outcome == "passed" and not expected_to_fail
            elif outcome == "failed":
                failed.add(node)
    except (ValueError, TypeError) as error:
        raise Unreadable(f"the results of the tests: {error}") from error
    return {node: ok and node not in failed for node, ok in called.items()} | dict.fromkeys(failed - set(called), False)


def _module_names(path: str) -> list[str]:
    """The names by which `path` could be imported, wherever an import begins."""
    *folders, name = path.split("/")
    return [*folders, name.partition(".")[0]]


def _test_passed(test: str, results: dict[str, bool]) -> bool:
    """True if `test` ran and passed; a file, class or unparametrised function means all tests below it."""
    outcomes = [ok for node, ok in results.items() if node == test or node.startswith((f"{test}::", f"{test}["))]
    return bool(outcomes) and all(outcomes)


def _identities(folder: Path) -> dict[str, tuple[int, int, int]]:
    """The files below `folder`: git replaces those that it changes."""
    found: dict[str, tuple[int, int, int]] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            status = os.lstat(path)
            found[os.path.relpath(path, folder)] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def _is_python_prefix(folder: Path) -> bool:
    """True if `folder` belongs only to one Python, so that mounting it exposes nothing else."""
    return folder != Path("/") and ((folder / "pyvenv.cfg").is_file() or any(folder.glob("lib/python3*/os.py")))
