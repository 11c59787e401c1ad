"""Which limits of the machine hold for a run, as `rolltap doctor` says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltap.harnesses.runtimes.machine import Cgroup, counts_tasks, limits_here, own_cgroup

NEW = "6.1.0-13-amd64"


def process(folder: Path, controllers: str, *, memory: str, pids: str) -> Path:
    """A /proc/self in the group node/run: `memory` bounds the parent, `pids` the group itself."""
    group = folder / "cgroup" / "node" / "run"
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text(controllers)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(memory)
    (group / "pids.max").write_text(pids)
    (folder / "self").mkdir()
    mounts = f"tmpfs / tmpfs rw 0 0\ncgroup2 {folder / 'cgroup'} cgroup2 rw 0 0\n"
    (folder / "self" / "mounts").write_text(mounts)
    (folder / "self" / "cgroup").write_text("3:cpu:/\n0::/node/run\n")
    return folder / "self"


def test_a_bound_of_a_parent_counts(tmp_path: Path) -> None:
    cgroup = own_cgroup(process(tmp_path, "cpu memory pids\n", memory="1000000\n", pids="max\n"))
    assert cgroup == Cgroup(("memory", "pids"), ("memory",), True)


def test_without_cgroup_v2_there_is_none(tmp_path: Path) -> None:
    assert own_cgroup(tmp_path / "nowhere") == Cgroup()
    here = process(tmp_path, "", memory="max", pids="max")
    (here / "mounts").write_text("cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n")
    assert own_cgroup(here) == Cgroup()


@pytest.mark.parametrize(
    ("cgroup", "uid", "release", "state", "advice"),
    [
        (Cgroup(), 1000, NEW, ["processes: kernel and watchdog", "no cgroup v2"], "put nodes into a cgroup"),
        (Cgroup(), 0, NEW, ["processes: watchdog (root is exempt"], "a user of their own; put nodes"),
        (Cgroup(), 1000, "5.10.0", ["processes: watchdog (the kernel counts none"], "put nodes into a cgroup"),
        (Cgroup(("memory",), (), True), 1000, NEW, ["has memory, writable, but no bound"], "put nodes into a cgroup"),
        (Cgroup(("memory",), (), False), 1000, NEW, ["has memory, not writable, but no"], "put nodes into a cgroup"),
        (Cgroup(("memory", "pids"), ("memory", "pids"), False), 1000, NEW, ["bounds memory and pids"], ""),
    ],
)
def test_the_doctor_says_which_limits_hold(
    cgroup: Cgroup, uid: int, release: str, state: list[str], advice: str
) -> None:
    text, todo = limits_here(cgroup, uid, release)
    assert all(part in text for part in state), text
    assert advice in todo if advice else todo == ""


def test_releases_are_compared_as_numbers() -> None:
    assert [counts_tasks(each) for each in ("5.14.0-70.el9", "5.4.0", "10.0", "4.18.0-553", "odd")] == [
        True,
        False,
        True,
        False,
        False,
    ]
