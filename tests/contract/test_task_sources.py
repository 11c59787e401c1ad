"""What every source of tasks promises, over the registry and over those that installed packages bring.

A source of a package's environments is asked for one that is not there: the real ones run in `make test-trainers`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rolltap.errors import TaskInvalid
from rolltap.extras import known_names
from rolltap.harnesses.agents.environments import PACKAGES
from rolltap.harnesses.runner.specs import Defaults, check, resolve_paths
from rolltap.harnesses.runner.tasks import ENTRY_POINTS, TASK_SOURCES, SourceOptions, is_source, tasks_of

NAMES = known_names(TASK_SOURCES, ENTRY_POINTS)
INSTANCE = {
    "instance_id": "one",
    "repo": "acme/calc",
    "base_commit": "abc",
    "problem_statement": "add is broken",
    "FAIL_TO_PASS": ["test_calc.py::test_two"],
    "PASS_TO_PASS": [],
}


def where(kind: str, folder: Path) -> str:
    """Something that the source takes."""
    if kind == "swebench":
        (folder / "instances.jsonl").write_text(json.dumps(INSTANCE))
        return str(folder / "instances.jsonl")
    return "one"


@pytest.mark.parametrize("kind", NAMES)
def test_its_tasks_can_be_submitted_and_are_the_same_every_time(kind: str, tmp_path: Path) -> None:
    target, options = f"{kind}:{where(kind, tmp_path)}", SourceOptions(tmp_path, python=sys.executable)
    assert is_source(target)
    if kind in PACKAGES:
        with pytest.raises(TaskInvalid, match="pip install"):
            tasks_of(target, options)
        return
    tasks = tasks_of(target, options)
    assert tasks == tasks_of(target, options)
    assert len({task.id for task in tasks}) == len(tasks) > 0
    for task in tasks:
        check(resolve_paths(task, Defaults(base=tmp_path, harness="codex")), ["tiny"])


@pytest.mark.parametrize("kind", NAMES)
def test_what_is_not_there_is_said_in_one_line(kind: str, tmp_path: Path) -> None:
    if kind not in TASK_SOURCES:
        return  # what somebody else's takes is not known here
    with pytest.raises(TaskInvalid, match="nowhere") as refused:
        tasks_of(f"{kind}:{tmp_path}/nowhere.py", SourceOptions())
    assert "\n" not in refused.value.message
