"""Reads tasks: JSON lines, Harbor task folders, SWE-style instances, and the sources that `KIND:WHERE` names.

A JSON line has `id`, `instruction`, `tags` and the keys of `specs.TaskSpec`. A Harbor folder has `task.toml`,
`instruction.md`, `environment/` and `tests/test.sh`. An instance of the SWE-bench family has `instance_id`, `repo`,
`base_commit`, `problem_statement`, `test_patch`, `FAIL_TO_PASS` and `PASS_TO_PASS`. A source is a function of WHERE and
the command line's options; an installed package adds its own by an entry point in `rolltap.task_sources`.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rolltap.errors import TaskInvalid
from rolltap.extras import lookup
from rolltap.harnesses.agents.environments import PACKAGES, list_tasks
from rolltap.harnesses.evaluators.environment import EnvironmentCheck
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.runner.specs import LimitsSpec, TaskSpec, parse_spec
from rolltap.types import Task

SWE_KEYS = {"instance_id", "base_commit", "problem_statement"}


def read_tasks(path: Path, repositories: Path | None = None, *, reward_key: str = "") -> list[Task]:
    """The tasks of a `.jsonl` file, of one Harbor folder, or of a folder of Harbor folders.

    `repositories`: the folder with the repositories of SWE-style instances, as `owner__name`. `reward_key`: the Harbor
    reward that counts. Raises `TaskInvalid`, with the file, the line and the wrong key; also for duplicate ids.
    """
    if path.is_dir():
        tasks = [harbor_task(folder, reward_key) for folder in task_folders(path)]
    else:
        tasks = _read_lines(path, repositories)
    refuse_twins(tasks, str(path))
    return tasks


def refuse_twins(tasks: Sequence[Task], where: str) -> None:
    """Raises `TaskInvalid` if two tasks of one source have the same id."""
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise TaskInvalid(f"{where}: two tasks have the id {task.id!r}", param="id")
        seen.add(task.id)


def task_folders(path: Path) -> list[Path]:
    """The Harbor folder `path`, or those in it. Empty if it is not a folder; raises `TaskInvalid` if it has none."""
    if not path.is_dir():
        return []
    folders = [path] if (path / "task.toml").is_file() else sorted(p.parent for p in path.glob("*/task.toml"))
    if not folders:
        raise TaskInvalid(f"{path} holds no Harbor task (a folder with task.toml)")
    return folders


def _read_lines(path: Path, repositories: Path | None) -> list[Task]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskInvalid(f"can't read the tasks of {path}: {error}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(task_from(json.loads(line), repositories))
            except TaskInvalid as error:
                raise TaskInvalid(f"{path}:{number}: {error.message}", param=error.param) from error
            except (json.JSONDecodeError, RecursionError) as error:
                raise TaskInvalid(f"{path}:{number}: not JSON: {error}") from error
    if not tasks:
        raise TaskInvalid(f"{path} holds no task")
    return tasks


def task_from(line: Any, repositories: Path | None = None) -> Task:
    """One line as a task, with a checked spec."""
    if not isinstance(line, dict):
        raise TaskInvalid("a task is a JSON object")
    if line.keys() >= SWE_KEYS:
        return swe_task(line, repositories)
    spec = {name: value for name, value in line.items() if name not in ("id", "instruction", "tags")}
    parse_spec(spec).check_source()
    tags = line.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise TaskInvalid("`tags` is a list of strings", param="tags")
    return Task(_text(line, "id"), _text(line, "instruction"), spec, tuple(tags))


def swe_task(instance: Mapping[str, Any], repositories: Path | None) -> Task:
    """An instance of the SWE-bench family: the repository at the base commit, tests from the test patch.

    Besides the family's keys it may have `image`, and `python`, the interpreter for the tests. Raises `TaskInvalid` if
    `FAIL_TO_PASS` names no test.
    """
    repository = _text(instance, "repo")
    name = repository.replace("/", "__")
    if name in (".", "..") or "\0" in name:
        raise TaskInvalid(f"{repository!r} names no repository", param="repo")
    if repositories is None:
        raise TaskInvalid(f"instance {instance['instance_id']} needs its repository {repository}: give --repositories")
    must_pass = _tests(instance, "FAIL_TO_PASS")
    if not must_pass:
        raise TaskInvalid(f"instance {instance['instance_id']}: `FAIL_TO_PASS` names no test", param="FAIL_TO_PASS")
    spec = TaskSpec(
        evaluator=PytestCheck(
            must_pass=must_pass,
            keep_passing=_tests(instance, "PASS_TO_PASS"),
            test_patch=instance.get("test_patch", ""),
            python=instance.get("python", "python3"),
        ),
        repository=str((repositories / name).resolve()),
        commit=_text(instance, "base_commit"),
        image=instance.get("image", ""),
    )
    return Task(_text(instance, "instance_id"), _text(instance, "problem_statement"), msgspec.to_builtins(spec))


def _tests(instance: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of node ids; some data sets have it as a JSON string."""
    tests = instance.get(key, [])
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError:
            raise TaskInvalid(f"`{key}` is not a list of tests", param=key) from None
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise TaskInvalid(f"`{key}` is not a list of tests", param=key)
    return tuple(tests)


def harbor_task(folder: Path, reward_key: str = "") -> Task:
    """Reads a Harbor folder. Its image is `environment.docker_image`; else `environment/` is the working copy."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskInvalid(f"{folder} is not a Harbor task: {error}") from error
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskInvalid(f"{folder} has no tests/test.sh", param="tests")
    environment, verifier, agent, about, metadata = (
        _table(config, name) for name in ("environment", "verifier", "agent", "task", "metadata")
    )
    image = environment.get("docker_image", "")
    files = folder / "environment"
    spec = TaskSpec(
        evaluator=HarborCheck(
            str((folder / "tests").resolve()), {k: str(v) for k, v in _table(verifier, "env").items()}, reward_key
        ),
        folder=str(files.resolve()) if files.is_dir() and not image else None,
        image=image,
        limits=LimitsSpec(
            setup_s=environment.get("build_timeout_sec"),
            agent_s=agent.get("timeout_sec"),
            evaluate_s=verifier.get("timeout_sec"),
        ),
    )
    name = about.get("name") or folder.resolve().name
    tags = metadata.get("tags", [])
    return Task(name, instruction, msgspec.to_builtins(spec), tuple(tags))


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise TaskInvalid(f"task.toml: `{key}` is a table, not {value!r}", param=key)
    return value


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise TaskInvalid(f"the task has no `{key}`", param=key)
    return value


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
