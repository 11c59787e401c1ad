"""A run's disk has a size that the kernel holds, where a file system can be mounted for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.harnesses.runtimes.disk import disks_work, has_own_mounts

FILL = """
import os, sys
def fill(path, unlinked=False):
    try:
        with open(path, "wb") as file:
            if unlinked:
                os.unlink(path)
            for _ in range(60):
                file.write(b"x" * 1_000_000)
    except OSError as error:
        return error.strerror
"""
WAYS = {
    "work": "print(fill('f'))",
    "home": "print(fill(os.path.expanduser('~/f')))",
    "a deleted file": "print(fill('f', unlinked=True))",
    "output": "sys.stdout.write('x' * 60_000_000)",
    "many": "[fill(str(number)) for number in range(5)]",
}
RUNS = """
import asyncio, json, sys
from pathlib import Path
from rolltap.harnesses.base import Command, Limits
from rolltap.harnesses.runtimes import disk, watchdog
from rolltap.harnesses.runtimes.bubblewrap import INTERPRETER, BubblewrapRuntime
from rolltap.harnesses.runtimes.sources import Files

disk.keep_mounts()

async def main(places, fill, ways):
    assert disk.disks_work(places)
    watchdog.WATCHDOG.watch = lambda run: None
    ends = {}
    for way, code in ways.items():
        workspace = await BubblewrapRuntime(places).prepare(Files({"a": "1"}))
        exit_ = await workspace.run(Command((INTERPRETER, "-c", fill + code)), Limits(disk_mb=20), 60)
        taken = watchdog.disk_usage([places])
        (workspace.folder / "verdict").write_text("x" * 100_000)  # an evaluator has room
        await workspace.close()
        ends[way] = [exit_.excess, exit_.output[-300:], taken, [path.name for path in places.iterdir()]]
    print(json.dumps(ends))

asyncio.run(main(Path(sys.argv[1]), *json.loads(sys.argv[2])))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_runs_files_have_a_size_in_all(tmp_path: Path) -> None:
    """In a mount namespace of its own, as a node's: nothing stays mounted if this test is ended."""
    argv = [sys.executable, "-c", RUNS, str(tmp_path), json.dumps([FILL, WAYS])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    for way, (excess, output, taken, left) in ends.items():
        assert taken < 26 << 20, way
        assert left == []
        if way in ("work", "home", "a deleted file"):
            assert "No space left" in output
        if way != "a deleted file":
            assert excess == "over 20 MB of disk", way


def test_without_mounts_of_its_own_a_runner_mounts_nothing(tmp_path: Path) -> None:
    if not has_own_mounts():
        assert not disks_work(tmp_path)
