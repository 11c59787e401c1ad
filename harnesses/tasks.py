"""Reads task files into checked `Task`s: JSON lines, Harbor task folders, and SWE-style instances.

A JSON line has `id`, `instruction`, `tags` and the keys of `specs.TaskSpec`. A Harbor folder has `task.toml`,
`instruction.md`, `environment/` and `tests/test.sh`. An instance of the SWE-bench family has `instance_id`, `repo`,
`base_commit`, `problem_statement`, `test_patch`, `FAIL_TO_PASS` and `PASS_TO_PASS`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rolltap.errors import TaskInvalid
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.specs import LimitsSpec, TaskSpec, parse_spec
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
        repository=str((repositories / repository.replace("/", "__")).resolve()),
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
