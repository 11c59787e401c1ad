"""Task sources. `KIND:WHERE` names a source; any other target is a file or folder of tasks (`tasks.py`).

A source is a function of WHERE and the command line's options. An installed package adds its own by an entry point in
`rolltap.task_sources`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rolltap.errors import TaskInvalid
from rolltap.extras import lookup
from rolltap.harnesses.environments import PACKAGES, list_tasks
from rolltap.harnesses.evaluators.environment import EnvironmentCheck
from rolltap.harnesses.specs import TaskSpec
from rolltap.harnesses.tasks import read_tasks, refuse_twins
from rolltap.types import Task


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The command line's options for a source.

    `python` is the interpreter that has an environment's package, `arguments` are the environment's own settings, and
    `take` is the number of its tasks to take (0: all, or 8 seeds of a game). `repositories` and `reward_key` have the
    same meaning as in `read_tasks`.
    """

    repositories: Path | None = None
    reward_key: str = ""
    python: str = sys.executable
    arguments: Mapping[str, Any] = field(default_factory=dict)
    take: int = 0


TaskSource = Callable[[str, SourceOptions], list[Task]]


@dataclass(frozen=True, slots=True)
class EnvironmentTasks:
    """Reads the tasks of an environment of `package`. The environment's own scorer evaluates each task."""

    package: str

    def __call__(self, where: str, options: SourceOptions) -> list[Task]:
        python = str(Path(options.python).absolute()) if "/" in options.python else options.python
        check = EnvironmentCheck(
            self.package, where, options=dict(options.arguments), python=python, reward_key=options.reward_key
        )
        check = check.resolve_paths(Path().absolute())
        if missing := [path for path in check.paths if not Path(path).is_file()]:
            raise TaskInvalid(f"{missing[0]}: no such file", param="where")
        rows = list_tasks(self.package, python, {**check.step.values, "take": options.take})
        if not rows:
            raise TaskInvalid(f"{self.package}:{where} holds no task")
        name = f"{Path(where.partition('@')[0]).stem}{where[where.find('@') :] if '@' in where else ''}"
        return [
            Task(
                f"{name}/{row.get('id') or row['sample']}",
                row["instruction"].strip() or f"Play {name}.",
                msgspec.to_builtins(TaskSpec(evaluator=msgspec.structs.replace(check, sample=row["sample"]))),
                (self.package,),
            )
            for row in rows
        ]


def swe_instances(where: str, options: SourceOptions) -> list[Task]:
    """Reads instances of the SWE-bench family from a file of JSON lines. Raises `TaskInvalid` for other tasks."""
    tasks = read_tasks(Path(where), options.repositories)
    if other_ids := [task.id for task in tasks if "repository" not in task.spec]:
        raise TaskInvalid(f"{where}: {other_ids[0]} is not an instance of the SWE-bench family")
    return tasks[: options.take or None]


TASK_SOURCES: Mapping[str, TaskSource] = {
    **{package: EnvironmentTasks(package) for package in PACKAGES},
    "swebench": swe_instances,
}
ENTRY_POINTS = "rolltap.task_sources"


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Parses `NAME=VALUE` pairs into a table. `a.b=1` sets `b` in the inner table `a`.

    A value is JSON, or text if it is not valid JSON. Raises `TaskInvalid` if a pair has another form.
    """
    table: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        *outer, last = name.split(".")
        if not equals or not all([*outer, last]):
            raise TaskInvalid(f"--arg takes NAME=VALUE, not {pair!r}", param="arg")
        inner = table
        for part in outer:
            inner = inner.setdefault(part, {})
        try:
            inner[last] = json.loads(text)
        except ValueError:
            inner[last] = text
    return table


def is_source(target: str) -> bool:
    """True if `target` is `KIND:WHERE`, and no path. Raises `TaskInvalid` for an unknown kind, with the known ones."""
    kind, colon, _ = target.partition(":")
    if not colon or "/" in kind or Path(target).exists():
        return False
    lookup("kind of tasks", kind, TASK_SOURCES, ENTRY_POINTS, TaskInvalid)
    return True


def tasks_of(target: str, options: SourceOptions) -> list[Task]:
    """Reads the tasks of a source, a file or a folder. Raises `TaskInvalid`; the message says what is wrong."""
    if not is_source(target):
        return read_tasks(Path(target), options.repositories, reward_key=options.reward_key)
    kind, _, where = target.partition(":")
    tasks = lookup("kind of tasks", kind, TASK_SOURCES, ENTRY_POINTS, TaskInvalid)(where, options)
    refuse_twins(tasks, target)
    return tasks
