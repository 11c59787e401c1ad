"""What of this machine bounds a run beside rlimits and the watchdog: the kernel's count of tasks, and cgroup v2."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rolltap.harnesses.base import Limits

TASKS_PER_PROCESS = 4
"""The kernel counts threads, the watchdog processes: an honest process may have several."""
CONTROLLERS = ("memory", "pids")


def counts_tasks(release: str) -> bool:
    """Whether a Linux of this release counts a user's tasks apart in each user namespace (5.14 and later).

    Before, all runs of a runner's user were counted together, and one run's limit would have ended another's forks.
    """
    numbers = re.findall(r"\d+", release)[:2]
    return tuple(map(int, numbers)) >= (5, 14)


def task_limit(limits: Limits) -> int:
    """How many processes and threads the kernel lets a sandboxed run have; 0 where it can't count them.

    It does not bind where the runner is root, also in a user namespace: there the watchdog alone counts.
    """
    return limits.processes * TASKS_PER_PROCESS if counts_tasks(platform.release()) else 0


@dataclass(frozen=True, slots=True)
class Cgroup:
    """This process's cgroup of version 2: the controllers of `CONTROLLERS` that it has, and those that bound it.

    `writable`: this user may make groups in it.
    """

    controllers: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()
    writable: bool = False


def own_cgroup(process: Path = Path("/proc/self")) -> Cgroup:
    """An empty one where there is no cgroup v2, or it can't be read."""
    with suppress(OSError):
        mounts = [line.split() for line in (process / "mounts").read_text().splitlines()]
        paths = [line[3:] for line in (process / "cgroup").read_text().splitlines() if line.startswith("0::/")]
        for mount in (Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"):
            group = mount / paths[0].lstrip("/") if paths else mount
            available = (group / "cgroup.controllers").read_text().split()
            chain = [each for each in (group, *group.parents) if each.is_relative_to(mount)]
            bounded = [name for name in CONTROLLERS if any(_is_bounded(each / f"{name}.max") for each in chain)]
            controllers = tuple(name for name in CONTROLLERS if name in available)
            return Cgroup(controllers, tuple(bounded), os.access(group, os.W_OK))
    return Cgroup()


def _is_bounded(file: Path) -> bool:
    """The root group has no such file."""
    return file.exists() and file.read_text().strip() != "max"


def limits_here(cgroup: Cgroup, uid: int, release: str) -> tuple[str, str]:
    """Which limits hold for a sandboxed run of this user, and what to do for better ones ("": nothing)."""
    if not counts_tasks(release):
        processes, user = "watchdog (the kernel counts none of a sandbox before Linux 5.14)", ""
    elif uid == 0:
        processes = "watchdog (root is exempt from the kernel's count)"
        user = "run nodes as a user of their own"
    else:
        processes, user = "kernel and watchdog", ""
    names, bounded = " and ".join(cgroup.controllers), " and ".join(cgroup.bounded)
    if cgroup.bounded:
        group = f"cgroup v2 bounds {bounded}"
    elif cgroup.controllers:
        group = f"cgroup v2 has {names}, {'writable' if cgroup.writable else 'not writable'}, but no bound"
    else:
        group = "no cgroup v2 with memory or pids"
    unbounded = len(cgroup.bounded) < len(CONTROLLERS)
    node = "put nodes into a cgroup: systemd-run -p MemoryMax=... -p TasksMax=..." if unbounded else ""
    state = f"files: rlimits; processes: {processes}; memory, disk: watchdog; {group}"
    return state, "; ".join(filter(None, (user, node)))
