"""A cgroup (version 2) for each run, where this process's own is delegated to it: memory, tasks and processor time.

A run is in its group from its first instruction and is killed as a whole; what it takes is counted by the kernel, also
of root. Without delegation, or without the controllers, rlimits and the watchdog remain (`machine.py`).
Source: Linux, `Documentation/admin-guide/cgroup-v2.rst`; systemd, `docs/CGROUP_DELEGATION.md`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from rolltap.harnesses.base import Limits

CONTROLLERS = ("memory", "pids", "cpu")
NEEDED = frozenset({"memory", "pids"})
MISSING = "no cgroup v2 with memory and pids"
TASKS_PER_PROCESS = 4
"""The kernel counts threads, the watchdog processes: an honest process may have several."""
RUNNER = "rolltap-runner"
"""The runner's own group: a group that hands controllers on has no processes itself."""
RUNNER_WEIGHT = 10_000
"""Processor time of the runner, which relays all runs' calls, beside 100 of each run."""
CLOSE_S = 5.0
SYSTEMD = Path("/run/systemd/system")
"""There where systemd rules the groups: it marks those that it has delegated."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """This process's cgroup: the controllers of `CONTROLLERS` that it has, and those that bound it.

    `refusal`: why runs get no groups in it; "" where they do. `root`: of the whole machine, whose processes may stay.
    """

    folder: Path | None = None
    controllers: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()
    refusal: str = MISSING
    root: bool = False


def own_cgroup(process: Path = Path("/proc/self"), systemd: Path = SYSTEMD) -> Cgroup:
    """An empty one where there is no cgroup v2, or it can't be read. Changes nothing."""
    with suppress(OSError):
        mounts = [line.split() for line in (process / "mounts").read_text().splitlines()]
        paths = [line[3:] for line in (process / "cgroup").read_text().splitlines() if line.startswith("0::/")]
        for mount in (Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"):
            group = mount / paths[0].lstrip("/") if paths else mount
            available = (group / "cgroup.controllers").read_text().split()
            chain = [each for each in (group, *group.parents) if each.is_relative_to(mount)]
            bounded = [name for name in CONTROLLERS if any(_is_bounded(each / f"{name}.max") for each in chain)]
            controllers = tuple(name for name in CONTROLLERS if name in available)
            root = not (group / "cgroup.type").exists()
            return Cgroup(group, controllers, tuple(bounded), _refusal(group, controllers, root, systemd), root)
    return Cgroup()


def _is_bounded(file: Path) -> bool:
    """The root group has no such file."""
    return file.exists() and file.read_text().split()[0] != "max"


def _refusal(group: Path, controllers: Sequence[str], root: bool, systemd: Path) -> str:
    if not NEEDED.issubset(controllers):
        return MISSING
    files = (group, group / "cgroup.procs", group / "cgroup.subtree_control")
    if not all(os.access(file, os.W_OK) for file in files) or (systemd.exists() and not _delegated(group)):
        return "this process's cgroup is not delegated to it"
    others = set(_processes(group)) - {os.getpid()}
    return "" if root or not others else "other processes are in this process's cgroup"


def _delegated(group: Path) -> bool:
    """Whether systemd has handed the group over: `Delegate=yes`."""
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _processes(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


@dataclass(frozen=True, slots=True)
class RunGroup:
    """One run's group. `enter` puts a command into it, `excess` says what it was over, `close` ends and removes it."""

    folder: Path
    limits: Limits

    @classmethod
    def make(cls, parent: Path, limits: Limits) -> Self:
        folder = parent / f"rolltap-run-{secrets.token_hex(8)}"
        folder.mkdir()
        bounds = {
            "memory.max": limits.memory_mb << 20,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": limits.processes * TASKS_PER_PROCESS,
        }
        try:
            for name, bound in bounds.items():
                if name != "memory.swap.max" or (folder / name).exists():  # a kernel without swap has none
                    (folder / name).write_text(str(bound))
        except OSError:
            folder.rmdir()
            raise
        return cls(folder, limits)

    def enter(self, argv: Sequence[str]) -> list[str]:
        """`argv` by a shell that is in the group before it becomes the command."""
        return ["/bin/sh", "-c", 'echo $$ >"$0/cgroup.procs" || exit 125; exec "$@"', str(self.folder), *argv]

    def excess(self) -> str:
        """Which limit the kernel has held against the run, in the watchdog's words; "": none."""
        if self._count("memory.events", "oom_kill"):
            return f"over {self.limits.memory_mb} MB of memory"
        if self._count("pids.events", "max"):
            return f"over {self.limits.processes} processes"
        return ""

    def _count(self, file: str, event: str) -> int:
        with suppress(OSError):
            for line in (self.folder / file).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == event:
                    return int(count)
        return 0

    def close(self) -> None:
        """Kills what is left in it, below it too. A group whose processes don't end within `CLOSE_S` stays behind."""
        until = time.monotonic() + CLOSE_S
        while True:
            with suppress(OSError):  # Linux before 5.14 has no such file: `tree.py` has killed what it found
                (self.folder / "cgroup.kill").write_text("1")
            with suppress(OSError):
                self.folder.rmdir()
            if not self.folder.exists() or time.monotonic() > until:
                return
            time.sleep(0.01)


def take_over(group: Cgroup) -> Path | None:
    """Where runs get their groups: `group`, which hands its controllers on from now on; None where it can't.

    This process moves into a group of its own below it, as one that hands on controllers has no processes.
    """
    if group.refusal or group.folder is None:
        return None
    runner = group.folder / RUNNER
    try:
        if not group.root:
            runner.mkdir(exist_ok=True)
            (runner / "cgroup.procs").write_text(str(os.getpid()))
        for name in group.controllers:
            (group.folder / "cgroup.subtree_control").write_text(f"+{name}")
        if not group.root and "cpu" in group.controllers:
            (runner / "cpu.weight").write_text(str(RUNNER_WEIGHT))
    except OSError:
        with suppress(OSError):
            (group.folder / "cgroup.procs").write_text(str(os.getpid()))
            runner.rmdir()
        return None
    return group.folder


@cache
def parent_of_runs() -> Path | None:
    """Where this process's runs get their groups; taken over when the first one begins."""
    return take_over(own_cgroup())


def run_group(limits: Limits) -> RunGroup | None:
    """A group for one run; None where there are none here."""
    parent = parent_of_runs()
    if parent is None:
        return None
    try:
        return RunGroup.make(parent, limits)
    except OSError:
        return None
