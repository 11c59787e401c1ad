"""Working copies of a repository: private, complete, and cheap."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from rolltap.harnesses.base import Command, Ending, Limits
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.disk import overlay_works
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import GitCommit

MEGABYTES = 4


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "big.bin").write_bytes(os.urandom(MEGABYTES << 20))
    (folder / "a.txt").write_text("original\n")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def used(folder: Path) -> int:
    """Bytes of disk below `folder`, mounts left out."""
    told = subprocess.run(["du", "-sxk", str(folder)], capture_output=True, text=True, check=True).stdout
    return int(told.split()[0]) << 10


@pytest.mark.parametrize("runtime_class", [ProcessRuntime, BubblewrapRuntime])
async def test_copies_are_private_and_git_works_in_them(
    repository: Path, tmp_path: Path, runtime_class: type[ProcessRuntime | BubblewrapRuntime]
) -> None:
    runtime = runtime_class(tmp_path / "workspaces")
    source = GitCommit(repository, "HEAD", cache=tmp_path / "cache")
    one, two = await asyncio.gather(runtime.prepare(source), runtime.prepare(source))
    script = "echo changed > a.txt && rm big.bin && git status --short && git log --format=%s"
    exit_ = await one.run(Command(("/bin/bash", "-c", script)), Limits(), 30)
    assert (exit_.ending, exit_.output.split()) == (Ending.DONE, ["M", "a.txt", "D", "big.bin", "one"])
    assert (two.folder / "a.txt").read_text() == "original\n"
    assert (source.base() / "a.txt").read_text() == "original\n"
    await one.close()
    await two.close()
    assert not os.listdir(tmp_path / "workspaces")


async def test_ten_copies_do_not_take_ten_times_the_space_where_overlays_work(repository: Path, tmp_path: Path) -> None:
    runtime = ProcessRuntime(tmp_path / "workspaces")
    source = GitCommit(repository, "HEAD", cache=tmp_path / "cache")
    workspaces = [await runtime.prepare(source) for _ in range(10)]
    assert all((workspace.folder / "big.bin").stat().st_size == MEGABYTES << 20 for workspace in workspaces)
    copies = 0 if overlay_works(tmp_path / "workspaces") else 2 * 10  # the file, and git's object of it
    assert used(tmp_path / "workspaces") <= (copies + 1) * MEGABYTES << 20
    for workspace in workspaces:
        await workspace.close()
