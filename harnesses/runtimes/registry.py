"""The runtimes that a task can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.extras import lookup
from rolltap.harnesses.base import Command, Launch, PythonCall, Runtime
from rolltap.harnesses.runtimes import bubblewrap
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.containers import ApptainerRuntime, DockerRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.thread import ThreadRuntime

RUNTIMES: Mapping[str, type[Runtime]] = {
    "thread": ThreadRuntime,
    "process": ProcessRuntime,
    "bubblewrap": BubblewrapRuntime,
    "docker": DockerRuntime,
    "apptainer": ApptainerRuntime,
}
NO_SNAPSHOTS: Mapping[type[Any], str] = {
    DockerRuntime: "containers of 'docker' do not reach the runner's listener on loopback",
    ProcessRuntime: "in 'process' each rollout has a folder of its own, where a fork's agent does not find its files",
}
"""The runtimes whose rollouts can't keep their files for forks, and why."""
ENTRY_POINTS = "rolltap.runtimes"
AUTO = "auto"
"""`bubblewrap` for commands, `thread` for Python calls. It never falls back to a runtime without a sandbox."""


def runtime_class(name: str) -> type[Runtime]:
    return lookup("runtime", name, RUNTIMES, ENTRY_POINTS, TaskInvalid)


def check_runtime(name: str) -> None:
    """Raises `TaskInvalid` if the runtime is unknown; "" is `auto`."""
    if name not in ("", AUTO):
        runtime_class(name)


def check_snapshots(runtime: type[Runtime]) -> None:
    """Raises `TaskInvalid` if the runtime's rollouts can't keep their files for forks."""
    why = next((why for kind, why in NO_SNAPSHOTS.items() if issubclass(runtime, kind)), "")
    if why:
        raise TaskInvalid(f"{why}, so it has no snapshots; use 'bubblewrap' or 'apptainer'", param="snapshots")


def runtime_for(name: str, launches: type[Launch]) -> type[Runtime]:
    """The runtime `name`, or the one that `auto` selects. Raises `TaskInvalid` if it can't run such launches.

    Raises `RuntimeFailed` if `auto` needs a sandbox and this machine has none.
    """
    if name in ("", AUTO):
        if launches is PythonCall:
            return ThreadRuntime
        if refusal := bubblewrap.refusal():
            raise RuntimeFailed(
                f"this machine has no sandbox for agents ({refusal}); apt install bubblewrap and allow user "
                "namespaces, or accept that an agent can read and change what you can: --runtime process"
            )
        return BubblewrapRuntime
    runtime = runtime_class(name)
    if runtime.launches is not launches:
        kind, others = ("commands", "thread") if runtime.launches is Command else ("Python calls", "bubblewrap")
        raise TaskInvalid(f"the runtime {name!r} runs {kind} only; use {others!r}", param="runtime")
    return runtime
