"""Which limits of the machine hold for a run, as `rolltap doctor` says it."""

from __future__ import annotations

import re

import pytest

from rolltap.harnesses.runtimes.cgroup import Cgroup, counts_tasks, limits_here

NEW = "6.1.0-13-amd64"
NO_GROUPS = "systemd-run -p Delegate=yes"


@pytest.mark.parametrize(
    ("cgroup", "uid", "release", "state", "advice"),
    [
        (Cgroup(), 1000, NEW, ["processes: kernel and watchdog", "no cgroup v2", "none bounds this"], NO_GROUPS),
        (Cgroup(), 0, NEW, ["processes: watchdog (root is exempt"], f"a user of their own; give nodes.*{NO_GROUPS}"),
        (Cgroup(), 1000, "5.10.0", ["processes: watchdog (the kernel counts none"], NO_GROUPS),
        (Cgroup(bounded=("memory",), refusal="others"), 1000, NEW, ["others; this process's bounds memory"], NO_GROUPS),
        (Cgroup(refusal=""), 0, NEW, ["processes, memory: each run's cgroup and watchdog"], ""),
    ],
)  # fmt: skip
def test_the_doctor_says_which_limits_hold(
    cgroup: Cgroup, uid: int, release: str, state: list[str], advice: str
) -> None:
    text, todo = limits_here(cgroup, uid, release)
    assert all(part in text for part in state), text
    assert re.search(advice, todo) if advice else todo == ""


def test_releases_are_compared_as_numbers() -> None:
    assert [counts_tasks(each) for each in ("5.14.0-70.el9", "5.4.0", "10.0", "4.18.0-553", "odd")] == [
        True,
        False,
        True,
        False,
        False,
    ]
