"""This machine's limits of a run besides rlimits and the watchdog: the kernel's count of tasks, and cgroups."""

from __future__ import annotations

import platform
import re

from rolltap.harnesses.base import Limits
from rolltap.harnesses.runtimes.cgroup import TASKS_PER_PROCESS, Cgroup


def counts_tasks(release: str) -> bool:
    """True if a Linux of this release counts a user's tasks per user namespace (5.14 and later).

    Older ones count all runs of the runner's user together: one run's limit would make another run's forks fail.
    """
    numbers = re.findall(r"\d+", release)[:2]
    return tuple(map(int, numbers)) >= (5, 14)


def task_limit(limits: Limits) -> int:
    """The kernel's limit of processes and threads for a sandboxed run; 0 if it can't count them.

    It has no effect if the runner is root, also in a user namespace: then only the watchdog counts.
    """
    return limits.processes * TASKS_PER_PROCESS if counts_tasks(platform.release()) else 0


def limits_here(cgroup: Cgroup, uid: int, release: str) -> tuple[str, str]:
    """The limits that apply to a sandboxed run of this user, and advice for better ones ("": none)."""
    if not counts_tasks(release):
        processes, user = "watchdog (the kernel counts none of a sandbox before Linux 5.14)", ""
    elif uid == 0:
        processes = "watchdog (root is exempt from the kernel's count)"
        user = "run nodes as a user of their own"
    else:
        processes, user = "kernel and watchdog", ""
    if not cgroup.refusal:
        return "files: rlimits; processes, memory: each run's cgroup and watchdog; disk: watchdog", ""
    group = f"this process's bounds {' and '.join(cgroup.bounded)}" if cgroup.bounded else "none bounds this process"
    state = f"files: rlimits; processes: {processes}; memory, disk: watchdog"
    refusal = f"runs get no cgroups: {cgroup.refusal}"
    node = "give nodes a cgroup to divide: systemd-run -p Delegate=yes rolltap node ..."
    return f"{state}; {refusal}; {group}", "; ".join(filter(None, (user, node)))
