"""A task's `spec` as typed data: what it starts from, what runs it, and what scores it.

This is the part of a `Task` that the ledger keeps without reading. It is checked when a task is submitted, so that an
unknown harness or a path that leaves the task's folder is refused there.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rolltap.errors import TaskInvalid
from rolltap.harnesses.base import Evaluator, Harness, Limits, Runtime, Source
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.llm_judge import CRITERIA, LlmJudge
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.evaluators.python_check import PythonCheck
from rolltap.harnesses.evaluators.session_completed import SessionCompleted
from rolltap.harnesses.install import find, own
from rolltap.harnesses.lifecycle import Assignment
from rolltap.harnesses.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.refusals import choice
from rolltap.harnesses.registry import get_harness
from rolltap.harnesses.runtimes.registry import AUTO, RUNTIMES, resolve
from rolltap.harnesses.sources import Empty, Files, Folder, GitCommit, inside
from rolltap.types import Task


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """A table with a `kind`; unknown keys are refused."""


class CommandSpec(_Spec, tag="command", frozen=True):
    """A shell command: its exit code, or the reward file it writes, is the reward."""

    command: str
    reward_file: str = ""

    def build(self, base: Path, client: AdminClient) -> Evaluator:
        return CommandCheck(self.command, self.reward_file)


class PytestSpec(_Spec, tag="pytest", frozen=True):
    """Tests that must pass, run in a fresh working copy."""

    must_pass: tuple[str, ...]
    keep_passing: tuple[str, ...] = ()
    test_patch: str = ""
    python: str = "python3"

    def build(self, base: Path, client: AdminClient) -> Evaluator:
        return PytestCheck(self.must_pass, self.keep_passing, self.test_patch, python=self.python)

    @property
    def needs(self) -> tuple[Path, ...]:
        """The folders of an absolute `python` that a sandbox must show: its virtual environment, its interpreter's."""
        if not Path(self.python).is_absolute():
            return ()
        prefixes = (path.parent.parent for path in (Path(self.python), Path(self.python).resolve()))
        return tuple(dict.fromkeys(prefix for prefix in prefixes if _is_pythons(prefix)))


class HarborSpec(_Spec, tag="harbor", frozen=True):
    """A Harbor task's `tests` folder."""

    tests: str
    env: dict[str, str] = {}

    def build(self, base: Path, client: AdminClient) -> Evaluator:
        return HarborCheck(located(base, self.tests), self.env)


class PythonSpec(_Spec, tag="python", frozen=True):
    """`module:function` on the runner's path: gets the working copy, returns the reward."""

    callable: str

    def build(self, base: Path, client: AdminClient) -> Evaluator:
        module, _, name = self.callable.partition(":")
        try:
            return PythonCheck(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise TaskInvalid(f"no callable {self.callable!r} (module:function): {error}", param="evaluator") from error


class CompletedSpec(_Spec, tag="session_completed", frozen=True):
    """1.0 where the harness says that it finished."""

    def build(self, base: Path, client: AdminClient) -> Evaluator:
        return SessionCompleted()


class JudgeSpec(_Spec, tag="llm_judge", frozen=True):
    """A model of `policy` scores by `criteria`."""

    policy: str
    criteria: str = CRITERIA

    def build(self, base: Path, client: AdminClient) -> Evaluator:
        return LlmJudge(client, self.policy, self.criteria)


EvaluatorSpec = CommandSpec | PytestSpec | HarborSpec | PythonSpec | CompletedSpec | JudgeSpec


class LimitsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`base.Limits`, each optional."""

    setup_s: float | None = None
    agent_s: float | None = None
    evaluate_s: float | None = None
    turns: int | None = None
    processes: int | None = None
    open_files: int | None = None
    file_mb: int | None = None

    def build(self) -> Limits:
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if any(value < 0 for value in given.values()):
            raise TaskInvalid(f"limits can't be negative: {given}", param="limits")
        return replace(Limits(), **given)


class TaskSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of `files`, `folder` or `repository` with `commit` is what the task starts from; none of them: empty.

    `harness`, `runtime` and `image` may be left to the command line. `argv` is for the harness `command`.
    """

    evaluator: EvaluatorSpec
    files: dict[str, str] | None = None
    folder: str | None = None
    repository: str | None = None
    commit: str = "HEAD"
    harness: str = ""
    dialect: str = ""
    argv: tuple[str, ...] = ()
    runtime: str = ""
    image: str = ""
    limits: LimitsSpec = LimitsSpec()

    def source_given(self) -> None:
        """`TaskInvalid` where the task starts from several things, or from a path that leaves its folder."""
        given = [name for name in ("files", "folder", "repository") if getattr(self, name) is not None]
        if len(given) > 1:
            raise TaskInvalid(f"a task starts from one of {', '.join(given)}, not from several", param=given[1])
        if self.files is not None:
            Files(self.files)

    def source(self, base: Path) -> Source:
        self.source_given()
        if self.files is not None:
            return Files(self.files)
        if self.folder is not None:
            return Folder(located(base, self.folder))
        if self.repository is not None:
            return GitCommit(located(base, self.repository), self.commit)
        return Empty()


@dataclass(frozen=True, slots=True)
class Defaults:
    """What stands for the keys that a task leaves out. `base` is what its relative paths are relative to."""

    base: Path = Path()
    harness: str = ""
    dialect: str = ""
    argv: tuple[str, ...] = ()
    runtime: str = ""
    workspaces: Path | None = None


def parse_spec(spec: Mapping[str, Any]) -> TaskSpec:
    """`TaskInvalid` names the key that is wrong."""
    try:
        return msgspec.convert(dict(spec), TaskSpec)
    except msgspec.ValidationError as error:
        raise TaskInvalid(f"the task can't be used: {error}") from error


def check(task: Task, policies: Collection[str]) -> None:
    """`TaskInvalid` where no node could run the task: what `build` refuses, as far as it shows without its files.

    `policies` are those that are served.
    """
    spec = parse_spec(task.spec)
    if not spec.harness:
        raise TaskInvalid(f"task {task.id} names no harness; add `harness` to its spec", param="harness")
    get_harness(spec.harness, dialect=spec.dialect, argv=spec.argv)
    if spec.runtime not in ("", AUTO):
        choice("runtime", spec.runtime, RUNTIMES)
    if isinstance(spec.evaluator, JudgeSpec):
        choice("policy", spec.evaluator.policy, dict.fromkeys(policies))
    spec.source_given()
    spec.limits.build()
    for path in (
        spec.folder,
        spec.repository,
        spec.evaluator.tests if isinstance(spec.evaluator, HarborSpec) else None,
    ):
        if path is not None and not Path(path).is_absolute():
            raise TaskInvalid(f"task {task.id}: {path!r} is relative; nodes need absolute paths", param="folder")


def placed(task: Task, defaults: Defaults) -> Task:
    """`task` as it is submitted: relative paths made absolute, and what it leaves out filled in from `defaults`."""
    spec = parse_spec(task.spec)
    argv = spec.argv or defaults.argv
    changed = msgspec.structs.replace(
        spec,
        harness=spec.harness or defaults.harness,
        dialect=spec.dialect or defaults.dialect,
        argv=argv,
        runtime=spec.runtime or defaults.runtime,
        folder=_absolute(defaults.base, spec.folder),
        repository=_absolute(defaults.base, spec.repository),
        evaluator=(
            msgspec.structs.replace(spec.evaluator, tests=str(located(defaults.base, spec.evaluator.tests).absolute()))
            if isinstance(spec.evaluator, HarborSpec)
            else spec.evaluator
        ),
    )
    return replace(task, spec=msgspec.to_builtins(changed))


def _absolute(base: Path, path: str | None) -> str | None:
    return None if path is None else str(located(base, path).absolute())


def build(task: Task, defaults: Defaults, client: AdminClient) -> Assignment:
    """`task` with everything it is run with; `TaskInvalid` where that can't be."""
    spec = parse_spec(task.spec)
    name = spec.harness or defaults.harness
    if not name:
        raise TaskInvalid(f"task {task.id} names no harness; add `harness`, or give --harness", param="harness")
    harness = get_harness(name, dialect=spec.dialect or defaults.dialect, argv=spec.argv or defaults.argv)
    return Assignment(
        task=task,
        source=spec.source(defaults.base),
        harness=harness,
        runtime=make_runtime(spec, harness, defaults),
        evaluator=spec.evaluator.build(defaults.base, client),
        limits=spec.limits.build(),
    )


def make_runtime(spec: TaskSpec, harness: Harness, defaults: Defaults) -> Runtime:
    """The task's runtime with `harness` on its PATH: our installation of its pinned release, else the user's own."""
    name = spec.runtime or defaults.runtime
    make = choice("runtime", resolve(name, python_call=isinstance(harness, MiniSweAgentInProcess)), RUNTIMES)
    installation = (find(harness.package) or own(harness.package)) if harness.package else None
    bins, needs = (installation.bins, installation.needs) if installation else ((), ())
    tests = spec.evaluator.needs if isinstance(spec.evaluator, PytestSpec) else ()
    return make(base=defaults.workspaces, bins=bins, needs=(*needs, *tests), image=spec.image)


def _is_pythons(prefix: Path) -> bool:
    """Whether the folder is a Python's own, and not one where other things lie, too."""
    return prefix != Path("/") and ((prefix / "pyvenv.cfg").is_file() or any(prefix.glob("lib/python3*/os.py")))


def located(base: Path, path: str) -> Path:
    """An absolute path as given; a relative one below `base`, which it may not leave."""
    return Path(path) if Path(path).is_absolute() else base / inside(path)
