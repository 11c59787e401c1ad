"""Where runs get cgroups of their own, and what is written for them. A real kernel: `tests/security/cgroup_live.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rolltap.harnesses.base import Limits
from rolltap.harnesses.runtimes.cgroup import RUNNER, RunGroup, own_cgroup, take_over
from rolltap.harnesses.runtimes.process import end_tree

ALL = "cpu io memory pids\n"
OWN = "cgroup.procs"


def process(folder: Path, controllers: str = ALL, *, memory: str = "max", pids: str = "max", others: str = "") -> Path:
    """A /proc/self in the group node/run: `memory` bounds the parent, `pids` the group itself."""
    group = folder / "cgroup" / "node" / "run"
    group.mkdir(parents=True)
    files = {
        "cgroup.controllers": controllers,
        "cgroup.type": "domain\n",
        "cgroup.procs": f"{os.getpid()}\n{others}",
        "cgroup.subtree_control": "",
        "memory.max": "max\n",
        "pids.max": pids,
    }
    for name, text in files.items():
        (group / name).write_text(text)
    (group.parent / "memory.max").write_text(memory)
    (folder / "self").mkdir()
    mounts = f"tmpfs / tmpfs rw 0 0\ncgroup2 {folder / 'cgroup'} cgroup2 rw 0 0\n"
    (folder / "self" / "mounts").write_text(mounts)
    (folder / "self" / "cgroup").write_text("3:cpu:/\n0::/node/run\n")
    return folder / "self"


@pytest.fixture
def no_systemd(tmp_path: Path) -> Path:
    return tmp_path / "no-systemd"


def test_a_bound_of_a_parent_counts(tmp_path: Path, no_systemd: Path) -> None:
    cgroup = own_cgroup(process(tmp_path, "cpu memory pids\n", memory="1000000\n"), no_systemd)
    assert (cgroup.controllers, cgroup.bounded, cgroup.refusal) == (("memory", "pids", "cpu"), ("memory",), "")


def test_without_cgroup_v2_there_is_none(tmp_path: Path) -> None:
    assert own_cgroup(tmp_path / "nowhere").refusal == "no cgroup v2 with memory and pids"
    here = process(tmp_path)
    (here / "mounts").write_text("cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n")
    assert own_cgroup(here).refusal == "no cgroup v2 with memory and pids"


def test_without_the_controllers_there_is_none(tmp_path: Path, no_systemd: Path) -> None:
    assert own_cgroup(process(tmp_path, "cpu memory\n"), no_systemd).refusal == "no cgroup v2 with memory and pids"


def test_a_group_with_other_processes_is_left_alone(tmp_path: Path, no_systemd: Path) -> None:
    cgroup = own_cgroup(process(tmp_path, others="1\n"), no_systemd)
    assert cgroup.refusal == "other processes are in this process's cgroup"
    assert take_over(cgroup) is None
    assert not (tmp_path / "cgroup/node/run" / RUNNER).exists()


def test_where_systemd_rules_a_group_must_be_delegated(tmp_path: Path) -> None:
    here = process(tmp_path)
    assert own_cgroup(here, tmp_path).refusal == "this process's cgroup is not delegated to it"
    os.setxattr(tmp_path / "cgroup/node/run", "user.delegate", b"1")
    assert own_cgroup(here, tmp_path).refusal == ""


def test_this_process_moves_aside_and_hands_the_controllers_on(tmp_path: Path, no_systemd: Path) -> None:
    group = tmp_path / "cgroup/node/run"
    assert take_over(own_cgroup(process(tmp_path), no_systemd)) == group
    assert (group / RUNNER / "cgroup.procs").read_text() == str(os.getpid())
    assert (group / RUNNER / "cpu.weight").read_text() == "10000"
    assert (group / "cgroup.subtree_control").read_text() == "+cpu"  # the last of three: a kernel adds them up


def test_the_machines_own_group_keeps_its_processes(tmp_path: Path, no_systemd: Path) -> None:
    here = process(tmp_path, others="1\n")
    (tmp_path / "cgroup/node/run/cgroup.type").unlink()
    assert take_over(own_cgroup(here, no_systemd)) == tmp_path / "cgroup/node/run"
    assert not (tmp_path / "cgroup/node/run" / RUNNER).exists()


def test_a_run_gets_its_bounds(tmp_path: Path) -> None:
    group = RunGroup.make(tmp_path, Limits(processes=7, memory_mb=3))
    bounds = {path.name: path.read_text() for path in group.folder.iterdir()}
    assert bounds == {"memory.max": "3145728", "memory.oom.group": "1", "pids.max": "28"}


def test_processes_are_killed_before_the_end_of_their_group_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux before 5.14 has no `cgroup.kill`: a group whose processes nobody has killed stays for `CLOSE_S`."""
    group, steps = RunGroup(tmp_path, Limits()), list[str]()
    for step in ("kill", "close"):
        monkeypatch.setattr(RunGroup, step, lambda self, step=step: steps.append(step))
    monkeypatch.setattr("rolltap.harnesses.runtimes.process.kill_marked", lambda mark: steps.append("marked"))
    end_tree(b"mark", group)
    assert steps == ["kill", "marked", "close"]


@pytest.mark.parametrize(
    ("file", "events", "excess"),
    [
        ("memory.events", "low 0\nmax 9\noom 1\noom_kill 2\n", "over 3 MB of memory"),
        ("memory.events", "low 0\nmax 9\noom 0\noom_kill 0\n", ""),  # it was held back, and given back what it held
        ("pids.events", "max 4\n", "over 7 processes"),
        ("pids.events", "max 0\n", ""),
    ],
)
def test_what_the_kernel_held_against_a_run_is_said(file: str, events: str, excess: str, tmp_path: Path) -> None:
    group = RunGroup(tmp_path, Limits(processes=7, memory_mb=3))
    (tmp_path / file).write_text(events)
    assert group.excess() == excess
