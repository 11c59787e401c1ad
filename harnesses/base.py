"""The Protocols for running a rollout, and the data that they exchange.

A `Harness` describes how to launch an agent. A `Runtime` creates a `Workspace` for it. An `Evaluator` scores the
result. They do not depend on each other or on the proxy; `runner/lifecycle.py` combines them.

An agent decides what its run prints. If the server refused the report of a bad rollout, the rollout would escape its
reward. So every text is made storable here and limited: its beginning, the size of the omitted part, its end.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, runtime_checkable

from rolltap.contract.admin import DETAIL_BYTES, EVALUATION_CHARS
from rolltap.contract.base import MAX_BODY
from rolltap.errors import EvaluatorFailed, TaskInvalid
from rolltap.tampering import TamperingAct
from rolltap.types import Scoring, Task
from rolltap.wording import did_you_mean

LARGEST_INTEGER = 2**63

REPORTED_BYTES = 3 * MAX_BODY // 4
"""The most bytes of an evaluation as JSON, which has 6 for some characters: the server refuses larger reports."""

KEPT_BYTES = 1 << 20
"""The most bytes kept of one run's output."""


class RunOutput:
    """A new file at `path` for a run's output.

    It is read by its descriptor alone: what lies at `path` after the run may be anything, such as a pipe. Reading moves
    no offset, which the run's processes share.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def append(self, line: str) -> None:
        os.pwrite(self.descriptor, line.encode(), os.fstat(self.descriptor).st_size)

    def text(self, limit: int = KEPT_BYTES) -> str:
        """Of more than `limit` bytes the first and the last half."""
        left_out = os.fstat(self.descriptor).st_size - limit
        if left_out <= 0:
            return os.pread(self.descriptor, limit, 0).decode("utf-8", errors="replace")
        half = limit // 2
        head, tail = os.pread(self.descriptor, half, 0), os.pread(self.descriptor, limit - half, half + left_out)
        marker = f"\n[... {left_out:,} bytes are left out ...]\n".encode()
        return (head + marker + tail).decode("utf-8", errors="replace")


def last_line(output: str) -> str:
    """The last line of an output, at most 300 characters, for a reason."""
    lines = storable(output).strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"


def storable(text: str) -> str:
    """The text with U+FFFD for characters that no store can hold: NUL, and half of a surrogate pair."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").replace("\0", "\ufffd")


def storable_detail(detail: Mapping[str, Any]) -> dict[str, Any]:
    """A reward's detail as JSON that the server accepts. Of one that is too large, the largest values are left out: an
    agent's file names are, and what was found about it stays."""
    stored = {storable(str(name)): _storable_value(value) for name, value in detail.items()}
    sizes = {name: len(json.dumps(value)) for name, value in stored.items()}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if len(json.dumps(stored)) <= DETAIL_BYTES:
            break
        stored[name] = f"{sizes[name]:,} bytes are left out"
    return stored


def _storable_value(value: Any) -> Any:
    match value:
        case str():
            return storable(value)
        case Mapping():
            return {storable(str(name)): _storable_value(item) for name, item in value.items()}
        case list() | tuple():
            return [_storable_value(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case bool() | None | float():
            return value
        case int() if -LARGEST_INTEGER <= value < LARGEST_INTEGER:
            return value
        case _:
            return storable(str(value))


def shortened(text: str, limit: int) -> str:
    """The text, or its first and last characters and how many are left out between them."""
    if len(text) <= limit:
        return text
    marker = f"\n[... {len(text) - limit:,} characters are left out ...]\n"
    half = (limit - len(marker)) // 2
    return text[:half] + marker + text[-half:]


class Transcript:
    """The output of an evaluation's steps, in order."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, step: str, output: str) -> None:
        self._parts.append(f"=== {step} ===\n{shortened(storable(output).rstrip(), KEPT_BYTES)}\n")

    def __str__(self) -> str:
        text = shortened("\n".join(self._parts), EVALUATION_CHARS)
        while (size := len(json.dumps(text))) > REPORTED_BYTES:
            text = shortened(text, len(text) * REPORTED_BYTES // (size + 1) - 1)
        return text


Source = Callable[[Path], None]
"""Fills an empty folder with a task's initial files. Called in a thread; see `sources.py`."""


RESERVE_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a harness's model.

    `base_url` is the session's own prefix (`http://host:port/s/<session>`) without `/v1`; `key` is the session's key;
    `model` is the name by which the harness requests the policy. The name matters: some harnesses send other requests
    for names they know. `context` is the model's context length in tokens, 0 if unknown; harnesses compact their
    history by it. With several policies, `roles` maps the name of each one's model, including `model`, to its context.
    """

    base_url: str
    key: str
    model: str
    context: int = 0
    roles: Mapping[str, int] = field(default_factory=dict)

    @property
    def reserve(self) -> int:
        """The tokens of the context that a harness keeps free for a reply: it compacts before they are used up."""
        return min(RESERVE_TOKENS, self.context // 4)

    @property
    def v1(self) -> str:
        """The base URL in the form for OpenAI-style clients."""
        return f"{self.base_url}/v1"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one rollout. Seconds count only the stage itself, not the wait for a slot."""

    setup_s: float = 300.0
    agent_s: float = 1800.0
    evaluate_s: float = 600.0
    turns: int = 0  # model calls of the main chain; 0 for no cap
    processes: int = 1024
    open_files: int = 4096  # of each process
    file_mb: int = 4096  # largest single file
    memory_mb: int = 16_384  # resident, of all processes
    disk_mb: int = 16_384  # in the workspace and HOME
    scratch_mb: int = 1024  # in a sandbox's /tmp, /var/tmp and /dev/shm, each


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a harness. Paths are as the agent sees them, for example inside its container.

    With `resume` the harness continues the conversation in HOME with `instruction` as the next message; a harness that
    cannot raises `TaskInvalid`.
    """

    endpoint: Endpoint
    instruction: str
    workdir: Path
    home: Path
    limits: Limits = field(default_factory=Limits)
    resume: bool = False


class Ending(StrEnum):
    """How a harness's run ended."""

    DONE = "done"
    LIMIT = "limit"  # it stopped at its own turn or budget cap
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Exit:
    """The result of a run. `output`: its text, without the middle if it is very long; `code`: None if a signal ended
    it; `excess`: the exceeded limit that ended it ("": none)."""

    ending: Ending
    seconds: float
    code: int | None = None
    output: str = ""
    excess: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A launch as a process: pure data.

    `env` is added to the runtime's clean environment. `files` maps paths below HOME to their text. `mounts` maps
    absolute paths in the workspace to folders of this machine, mounted writable (a runtime without a file system of its
    own refuses them). `endings` maps exit codes with another meaning than 0: done, else: crashed. With `terminal`, it
    gets this process's terminal, for a person at the keyboard; its output is not kept.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    endings: Mapping[int, Ending] = field(default_factory=dict)
    terminal: bool = False

    def ending(self, code: int | None) -> Ending:
        """The ending for exit code `code`."""
        if code is not None and code in self.endings:
            return self.endings[code]
        return Ending.DONE if code == 0 else Ending.CRASHED


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A launch as a call in one of the runner's threads, for agents that are libraries.

    `run` gets an event that is set when the run should end. It returns the ending and the tail of the output. It shares
    the runner's process, so it is only for trusted agents.
    """

    run: Callable[[threading.Event], tuple[Ending, str]]


Launch = Command | PythonCall


@dataclass(frozen=True, slots=True)
class Package:
    """The release of a harness that its definition was tested with, and its package manager.

    `executable` is looked up on PATH ("": a library without one). `also`: requirements that the release does not
    declare. `python` and `node`: the lowest versions that it supports.
    """

    manager: Literal["npm", "pip"]
    name: str
    version: str
    executable: str
    also: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)
    node: int = 20


class Harness(Protocol):
    """The definition of an agent that runs unmodified: one short file that points it at a session."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> Package | None:
        """The package to install; None if there is none."""
        ...

    @property
    def dialect(self) -> str:
        """The protocol that it uses: a name of the proxy's dialects."""
        ...

    @property
    def quirks(self) -> tuple[str, ...]:
        """Peculiarities that a reader of its record should know, one sentence each."""
        ...

    def launch(self, job: Job) -> Launch:
        """The launch for `job`. Has no side effects."""
        ...


@runtime_checkable
class Interactive(Protocol):
    """A harness that has a form for a person at a terminal, beside the one that runs unattended."""

    def converse(self, job: Job) -> Command:
        """The launch for a person at the terminal: no prompt is given. Has no side effects."""
        ...


@runtime_checkable
class GoesOn(Protocol):
    """A harness that can go on in the middle of its work by its own files in HOME."""

    def go_on(self, job: Job) -> Launch:
        """The launch that goes on with no new message where HOME's conversation stopped; where none has begun, it
        begins. Has no side effects."""
        ...


@dataclass(frozen=True, slots=True)
class CodeWork:
    """A folder that an evaluator's code works in, and what is done in a thread after each command there."""

    folder: Path
    after: Callable[[], None]


class CodeHelper(Protocol):
    """How an evaluator's program starts code of the working copy: by the helper that `env` names, with `mounts`.

    `shared`: why that code runs beside the program and not in a sandbox of its own; "" if it does. `runs`: how often
    the helper was used. `exits`: the exit codes of that code.
    """

    @property
    def env(self) -> Mapping[str, str]: ...

    @property
    def mounts(self) -> Mapping[str, Path]: ...

    @property
    def shared(self) -> str: ...

    @property
    def runs(self) -> int: ...

    @property
    def exits(self) -> Collection[int]: ...

    @property
    def excess(self) -> str:
        """The limit that such code exceeded, or the evaluator's time, if it took that; "" if neither."""
        ...

    @property
    def removed(self) -> Sequence[str]:
        """The paths removed from the working copy, as they led out of it or would block the program."""
        ...


class Workspace(Protocol):
    """A prepared workspace to run in: a working copy and a temporary HOME.

    `folder` is the working copy on this machine and `home_folder` its HOME; `workdir` and `home` are the paths that the
    agent sees. After a run both may contain links to anywhere: never follow them.
    """

    folder: Path
    home_folder: Path
    workdir: Path
    home: Path

    def endpoint(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` with its address from inside the workspace."""
        ...

    async def run(self, launch: Launch, limits: Limits, timeout: float, *, reach: str = "") -> Exit:
        """Runs until it ends or `timeout` seconds have passed. Its whole process tree has ended when this returns.

        `reach` is the URL of the model: the only address that a runtime with a network of its own allows. Raises
        `RuntimeFailed` if the workspace itself fails. Cancelling the call kills the tree, too.
        """
        ...

    @property
    def places(self) -> Mapping[Path, Path]:
        """The working copy, or its folders, by the paths that the agent sees."""
        ...

    @property
    def is_sandboxed(self) -> bool:
        """Whether each command runs in a sandbox of its own."""
        ...

    def code_helper(
        self, limits: Limits, deadline: float, work: CodeWork | None = None
    ) -> AbstractAsyncContextManager[CodeHelper]:
        """A helper for an evaluator's program, which serves until the context ends.

        Code that it runs ends by `deadline` (monotonic clock) and changes nothing that the program sees: it works in
        `work`, or without that in a copy of the working copy. Raises `Unreadable` if that can't be looked through.
        """
        ...

    async def clear_home(self) -> None:
        """Replaces HOME and the scratch folder by empty ones. Links are removed, not followed."""
        ...

    async def close(self) -> None:
        """Removes the workspace, whatever its state."""
        ...


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Options of a runtime.

    `base`: the folder of its workspaces (None: the system's temporary folder). `bins`: put before the system's PATH.
    `needs`: folders that a sandbox must mount, read-only. `image`: the container's image.
    """

    base: Path | None = None
    bins: tuple[Path, ...] = ()
    needs: tuple[Path, ...] = ()
    image: str = ""


class Runtime(Protocol):
    """Creates workspaces. A runtime is one file with such a class, and a line in `runtimes/registry.py`."""

    launches: ClassVar[type[Launch]]
    """The kind of launches that its workspaces run: commands or Python calls."""

    @property
    def name(self) -> str: ...

    @classmethod
    def create(cls, options: RuntimeOptions) -> Self:
        """Raises `TaskInvalid` for invalid options, `RuntimeFailed` if this machine does not support the runtime."""
        ...

    async def prepare(self, source: Source) -> Workspace:
        """A new workspace filled by `source`. Raises `RuntimeFailed`."""
        ...


@dataclass(frozen=True, slots=True)
class Score:
    """A value to append as a reward. `scope` is as in `rolltap.types.Reward`.

    `source`: what gave it, if it was not the evaluator; the verdict's detail is then not about it.
    """

    value: float
    scope: str = "rollout"
    detail: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An evaluator's result: its scores, their explanation, and the tampering that it found.

    `scoring` None: the ledger decides by the rollout's status (a rollout that timed out is masked, one whose harness
    crashed is unscorable).
    """

    scores: tuple[Score, ...]
    detail: Mapping[str, Any] = field(default_factory=dict)
    scoring: Scoring | None = None
    tampering: tuple[TamperingAct, ...] = ()


OWN_CONFIGURATION: Mapping[str, str] = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "4",  # the working copy's own .git/config can name programs that git would start
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
    "GIT_CONFIG_KEY_2": "safe.bareRepository",  # any folder with the right files is one
    "GIT_CONFIG_VALUE_2": "explicit",
    "GIT_CONFIG_KEY_3": "core.attributesFile",
    "GIT_CONFIG_VALUE_3": "/dev/null",
    "PIP_CONFIG_FILE": "/dev/null",
    "NPM_CONFIG_USERCONFIG": "/dev/null",
}
"""Environment that keeps an evaluation's tools from reading configuration that an agent may have written."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of an evaluator. The agent ran in `workspace`; each call of `clean_workspace` gives an untouched one.

    Without a `session_id` no agent ran: the evaluator is tried on the task's own files.

    Text that the evaluator adds to `seen` is stored with the rollout, even if the evaluation fails. The evaluator's
    time limit counts from `began` (monotonic clock).
    """

    task: Task
    exit: Exit
    workspace: Workspace
    clean_workspace: Callable[[], Awaitable[Workspace]]
    limits: Limits
    session_id: str = ""
    rollout_id: str = ""
    seen: Transcript = field(default_factory=Transcript)
    began: float = field(default_factory=time.monotonic)
    harness: str = ""
    extend: Callable[[float], None] = lambda _: None
    """Tells the runner that the evaluator has so many seconds from now."""

    def anew(self, runs: int = 1) -> Evidence:
        """The same evidence for checks of the result, with as much time for each run as the result had: slow tests of
        honest work would leave none."""
        self.extend(runs * self.limits.evaluate_s)
        return replace(self, began=time.monotonic() + (runs - 1) * self.limits.evaluate_s)

    @property
    def deadline(self) -> float:
        """When the evaluator's time is over, by the monotonic clock."""
        return self.began + self.limits.evaluate_s

    async def run(self, workspace: Workspace, step: str, launch: Command) -> Exit:
        """Runs a step of the evaluation with an empty HOME within the remaining time; adds its output to `seen`.

        Files that an agent left in HOME or the scratch folder cannot affect the step. Raises `EvaluatorFailed` if the
        time runs out.
        """
        await workspace.clear_home()
        remaining_s = self.deadline - time.monotonic()
        launch = replace(launch, env={**OWN_CONFIGURATION, **launch.env})
        exit_ = await workspace.run(launch, self.limits, max(0.0, remaining_s))
        self.seen.add(step, exit_.output)
        if exit_.ending is Ending.TIMED_OUT:
            raise EvaluatorFailed(f"{step} ran past {self.limits.evaluate_s:g} s")
        return exit_


class Evaluator(Protocol):
    """Scores a rollout after its agent has ended."""

    @property
    def name(self) -> str: ...

    @property
    def needs_clean_workspace(self) -> bool:
        """True if it calls `Evidence.clean_workspace`: the runner then prepares that workspace while the agent runs."""
        ...

    @property
    def reward_files(self) -> Sequence[str]:
        """Files below the working copy that only the evaluator may write."""
        ...

    async def evaluate(self, evidence: Evidence) -> Verdict:
        """Scores the rollout. Raises `EvaluatorFailed` if there is no usable reward."""
        ...


T = TypeVar("T")


def choice(what: str, name: str, known: Mapping[str, T]) -> T:
    """`known[name]`. Raises `TaskInvalid`, with the known names, if it is unknown."""
    if name not in known:
        raise TaskInvalid(
            f"no {what} {name!r}; known: {', '.join(sorted(known))}{did_you_mean(name, known)}", param=what.split()[0]
        )
    return known[name]


def refuse_image(name: str, image: str) -> None:
    """Raises `TaskInvalid` if a task names an image for a runtime without containers."""
    if image:
        raise TaskInvalid(f"the runtime {name!r} has no images; use 'docker' or 'apptainer'", param="image")


def refuse_resume(name: str, job: Job) -> None:
    """Raises `TaskInvalid` if `job` asks harness `name` to continue an earlier conversation."""
    if job.resume:
        raise TaskInvalid(f"{name} can't continue an earlier conversation; run it afresh", param="resume")
