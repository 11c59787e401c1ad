"""Limits of runs by real cgroups: run it by name, as the only process of a cgroup (version 2) that is delegated to it.

Not collected with the rest: where there are no such cgroups it has nothing to say.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rolltap.harnesses.base import Command, Ending, Exit, Limits, Runtime
from rolltap.harnesses.runtimes import cgroup, watchdog
from rolltap.harnesses.runtimes.bubblewrap import INTERPRETER, BubblewrapRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files

BOMB = "f() { f & f & wait; }; f"
MANY = "import os, time; os.fork(); os.fork(); block = b'x' * (40 << 20); time.sleep(600)"
SCRATCH = "head -c 90000000 /dev/zero > /dev/shm/f; sleep 600"
DAEMON = "for i in 1 2 3; do env -i setsid sleep 600 & done; sleep 0.5"
SPIN = "for i in $(seq 8); do while :; do :; done & done; touch spinning; wait"
TIMED = "import time; t = time.process_time; end = time.monotonic() + 4\nwhile time.monotonic() < end: pass\nprint(t())"


@pytest.fixture(params=["process", "bubblewrap"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Runtime:
    return ProcessRuntime(tmp_path) if request.param == "process" else BubblewrapRuntime(tmp_path)


@pytest_asyncio.fixture(autouse=True)
async def nothing_left(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """No watchdog: what ends a run here is the kernel. No group is there when a test ends."""
    monkeypatch.setattr(watchdog.WatchedRun, "look", lambda *_: None)
    parent = cgroup.parent_of_runs()
    assert parent is not None, cgroup.own_cgroup().refusal
    yield parent
    assert list(parent.glob("rolltap-run-*")) == []


async def run(runtime: Runtime, argv: tuple[str, ...], limits: Limits, timeout: float = 60) -> Exit:
    workspace = await runtime.prepare(Files({}))
    try:
        return await workspace.run(Command(argv), limits, timeout)
    finally:
        await workspace.close()


def tasks_of_runs(parent: Path) -> list[int]:
    return [int(path.read_text()) for path in parent.glob("rolltap-run-*/pids.current")]


def sleeping() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.read_bytes() == b"sleep\x00600\x00"]


async def test_memory_of_all_processes_has_a_bound(runtime: Runtime) -> None:
    exit_ = await run(runtime, (INTERPRETER, "-c", MANY), Limits(memory_mb=100))
    assert (exit_.ending, exit_.excess) == (Ending.CRASHED, "over 100 MB of memory")


async def test_what_lies_in_memorys_own_folders_counts(tmp_path: Path) -> None:
    exit_ = await run(BubblewrapRuntime(tmp_path), ("bash", "-c", SCRATCH), Limits(memory_mb=64))
    assert (exit_.ending, exit_.excess) == (Ending.CRASHED, "over 64 MB of memory")


async def test_a_fork_bomb_is_held_from_its_first_moment(runtime: Runtime, nothing_left: Path) -> None:
    task = asyncio.create_task(run(runtime, ("bash", "-c", BOMB), Limits(processes=10), 5))
    peak = 0
    while not task.done():
        peak = max([peak, *tasks_of_runs(nothing_left)])
        await asyncio.sleep(0.02)
    assert (await task).excess == "over 10 processes"
    assert 10 < peak <= 10 * cgroup.TASKS_PER_PROCESS


async def test_a_daemon_without_our_mark_is_ended(runtime: Runtime) -> None:
    exit_ = await run(runtime, ("bash", "-c", DAEMON), Limits())
    assert exit_.ending is Ending.DONE
    assert sleeping() == []


async def test_an_agent_that_spins_leaves_a_sibling_its_half(runtime: Runtime, tmp_path: Path) -> None:
    """On one processor, eight processes beside one: without groups it would get a ninth."""
    os.sched_setaffinity(0, {0})
    workspace = await runtime.prepare(Files({}))
    spinning = asyncio.create_task(workspace.run(Command(("bash", "-c", SPIN)), Limits(), 60))
    while not (workspace.folder / "spinning").exists():  # noqa: ASYNC110  a sandbox has no other way to say so
        await asyncio.sleep(0.05)
    exit_ = await run(runtime, (INTERPRETER, "-c", TIMED), Limits())
    spinning.cancel()
    await asyncio.gather(spinning, return_exceptions=True)
    await workspace.close()
    assert float(exit_.output) > 4 * 0.35


async def test_an_honest_run_is_left_alone(runtime: Runtime) -> None:
    exit_ = await run(runtime, ("bash", "-c", "cat /proc/self/cgroup; seq 3"), Limits())
    assert (exit_.ending, exit_.excess) == (Ending.DONE, "")
    assert exit_.output.endswith("1\n2\n3\n")
