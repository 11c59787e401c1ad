"""A task's `spec` as typed data: its source, harness, runtime and evaluator.

The ledger stores the spec of a `Task` without reading it. It is checked when a task is submitted: an unknown harness or
a path that leaves the task's folder is refused there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rolltap.contract.admin import Fork
from rolltap.contract.rules import NO_RULES, SessionRules
from rolltap.decoding import convert
from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.agents.environments import NAME as ENVIRONMENT
from rolltap.harnesses.agents.environments import EnvironmentLoop
from rolltap.harnesses.agents.install import find, not_installed, own
from rolltap.harnesses.agents.registry import get_harness
from rolltap.harnesses.base import Endpoint, Harness, Job, Launch, Limits, PythonCall, RuntimeOptions, Source
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.base import EvaluatorTable
from rolltap.harnesses.evaluators.call_rubric import WithCallScores
from rolltap.harnesses.evaluators.environment import EnvironmentCheck
from rolltap.harnesses.evaluators.registry import parse_evaluator
from rolltap.harnesses.runner.lifecycle import Assignment
from rolltap.harnesses.runner.snapshots import SnapshotStore
from rolltap.harnesses.runtimes.registry import AUTO, check_runtime, check_snapshots, runtime_class, runtime_for
from rolltap.harnesses.runtimes.sources import Empty, Files, Folder, GitCommit, located
from rolltap.types import Task
from rolltap.wording import did_you_mean, value_problem

SAMPLE_JOB = Job(Endpoint("http://127.0.0.1:1/s/sample", "key", "model"), "sample", Path("/w"), Path("/h"))


class LimitsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`base.Limits`; None: the default."""

    setup_s: float | None = None
    agent_s: float | None = None
    evaluate_s: float | None = None
    turns: int | None = None
    processes: int | None = None
    open_files: int | None = None
    file_mb: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    scratch_mb: int | None = None

    def build(self) -> Limits:
        values = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if any(value < 0 for value in values.values()):
            raise TaskInvalid(f"limits can't be negative: {values}", param="limits")
        return replace(Limits(), **values)


class TaskSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The task starts from `files`, from `folder`, or from `repository` at `commit`; else from an empty folder.

    `harness`, `runtime` and `image` may come from the command line instead. `argv` is for the harness `command`.
    `rules` are those of each attempt's session. The task's rollouts continue the call `fork` of another rollout, which
    the server reads. With `snapshots` they keep their files for forks, and begin with those of their origin.
    """

    evaluator: EvaluatorTable = EvaluatorTable()  # set by `parse_spec`: its class depends on its kind
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
    rules: SessionRules = NO_RULES
    fork: Fork | None = None
    snapshots: bool = False

    def check_source(self) -> None:
        """Raises `TaskInvalid` if the task names several sources, or a path that leaves its folder."""
        sources = [name for name in ("files", "folder", "repository") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise TaskInvalid(f"a task starts from one of {', '.join(sources)}, not from several", param=sources[1])
        if self.files is not None:
            Files(self.files)
        for path in (self.folder, self.repository):
            if path is not None:
                located(Path(), path)

    def source(self, base: Path) -> Source:
        self.check_source()
        if self.files is not None:
            return Files(self.files)
        if self.folder is not None:
            return Folder(located(base, self.folder))
        if self.repository is not None:
            return GitCommit(located(base, self.repository), self.commit)
        return Empty()

    def harness_name(self, default: str = "") -> str:
        """The task's harness, else `default`, else the environment's own loop if the evaluator is an environment."""
        return self.harness or default or (ENVIRONMENT if isinstance(self.evaluator, EnvironmentCheck) else "")

    def build_harness(self, defaults: Defaults) -> Harness:
        name = self.harness_name(defaults.harness)
        if name != ENVIRONMENT:
            if isinstance(self.evaluator, EnvironmentCheck):
                self.evaluator.check_answers()
            return get_harness(name, dialect=self.dialect or defaults.dialect, argv=self.argv or defaults.argv)
        if not isinstance(self.evaluator, EnvironmentCheck):
            raise TaskInvalid("the harness 'environment' needs an evaluator of that kind, too", param="harness")
        return self.evaluator.loop()

    def runtime_options(self, harness: Harness, defaults: Defaults) -> RuntimeOptions:
        """The options that put `harness` on PATH: our installation of its pinned release, else the user's own."""
        installation = (find(harness.package) or own(harness.package)) if harness.package else None
        bins, needs = (installation.bins, installation.needs) if installation else ((), ())
        if isinstance(harness, EnvironmentLoop):
            needs = harness.needs
        return RuntimeOptions(defaults.workspaces, bins, (*needs, *self.evaluator.needs), self.image)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for the keys that a task omits. A task's relative paths are relative to `base`."""

    base: Path = Path()
    harness: str = ""
    dialect: str = ""
    argv: tuple[str, ...] = ()
    runtime: str = ""
    workspaces: Path | None = None
    snapshots: Path | None = None


def parse_spec(spec: Mapping[str, Any]) -> TaskSpec:
    """Parses a spec. Raises `TaskInvalid`, with the wrong key: a mistyped one before what is missing without it."""
    table = dict(spec)
    if unknown := sorted(table.keys() - set(TaskSpec.__struct_fields__)):
        hint = did_you_mean(unknown[0], (*TaskSpec.__struct_fields__, "id", "instruction", "tags"))
        raise TaskInvalid(f"the task can't be used: unknown field `{unknown[0]}`{hint}", param=unknown[0])
    evaluator = parse_evaluator(table.pop("evaluator", None))
    try:
        return msgspec.structs.replace(convert(table, TaskSpec), evaluator=evaluator)
    except msgspec.ValidationError as error:
        raise TaskInvalid(f"the task can't be used: {value_problem(str(error))}") from error


def check(task: Task, policies: Collection[str]) -> None:
    """Raises `TaskInvalid` if no node could run the task, as far as can be checked without a node's files.

    `policies` are the served ones.
    """
    spec = parse_spec(task.spec)
    _harness_of(task, spec, Defaults())
    check_runtime(spec.runtime)
    if spec.snapshots and spec.runtime not in ("", AUTO):
        check_snapshots(runtime_class(spec.runtime))
    spec.evaluator.check(policies)
    if spec.evaluator.call_rubric is not msgspec.UNSET:
        spec.evaluator.call_rubric.check(policies)
    spec.check_source()
    spec.limits.build()
    for path in (spec.folder, spec.repository, *spec.evaluator.paths):
        if path is not None and not Path(path).is_absolute():
            raise TaskInvalid(f"task {task.id}: {path!r} is relative; nodes need absolute paths", param="folder")


def resolve_paths(task: Task, defaults: Defaults) -> Task:
    """`task` as it is submitted: with absolute paths, and with omitted keys from `defaults`."""
    spec = parse_spec(task.spec)
    base = defaults.base
    complete = msgspec.structs.replace(
        spec,
        harness=spec.harness_name(defaults.harness),
        dialect=spec.dialect or defaults.dialect,
        argv=spec.argv or defaults.argv,
        runtime=spec.runtime or defaults.runtime,
        folder=spec.folder and str(located(base, spec.folder).absolute()),
        repository=spec.repository and str(located(base, spec.repository).absolute()),
        evaluator=spec.evaluator.resolve_paths(base),
    )
    return replace(task, spec=msgspec.to_builtins(complete))


def build(task: Task, defaults: Defaults, client: AdminClient) -> Assignment:
    """The assignment that runs `task` on this machine. Raises `TaskInvalid` if it can't run here."""
    spec = parse_spec(task.spec)
    harness = _harness_of(task, spec, defaults)
    runtime = runtime_for(spec.runtime or defaults.runtime, launch_type(harness))
    if spec.snapshots:
        check_snapshots(runtime)
    store = SnapshotStore() if defaults.snapshots is None else SnapshotStore(defaults.snapshots)
    evaluator, rubric = spec.evaluator.build(client), spec.evaluator.call_rubric
    return Assignment(
        task=task,
        source=spec.source(defaults.base),
        harness=harness,
        runtime=runtime.create(spec.runtime_options(harness, defaults)),
        evaluator=evaluator if rubric is msgspec.UNSET else WithCallScores(evaluator, rubric, client),
        limits=spec.limits.build(),
        rules=spec.rules,
        snapshots=store if spec.snapshots else None,
    )


def _harness_of(task: Task, spec: TaskSpec, defaults: Defaults) -> Harness:
    if not spec.harness_name(defaults.harness):
        raise TaskInvalid(f"task {task.id} names no harness; add `harness`, or give --harness", param="harness")
    return spec.build_harness(defaults)


def check_installed(assignment: Assignment) -> None:
    """Raises `RuntimeFailed`, with the command to type, if this machine needs the harness's program and lacks it."""
    harness = assignment.harness
    if assignment.runtime.name not in ("process", "bubblewrap") or launch_type(harness) is PythonCall:
        return
    if harness.package is not None and (find(harness.package) or own(harness.package)) is None:
        raise RuntimeFailed(not_installed(harness))


def launch_type(harness: Harness) -> type[Launch]:
    """The harness's kind of launch: command or Python call. Uses a sample launch, which has no side effects."""
    return type(harness.launch(SAMPLE_JOB))
