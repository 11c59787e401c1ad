"""Runs a command and ends its whole process tree, including daemons that left its group and session.

Every process of a run inherits the environment variable `ROLLTAP_WORKSPACE`. Ending a run kills its process group, then
every process with that mark, until there is none. (Linux only: the mark is read from `/proc`.) A run with a cgroup of
its own is killed through it before the search for the mark.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.base import Ending, Limits
from rolltap.harnesses.runtimes.cgroup import RunGroup, run_group
from rolltap.harnesses.runtimes.watchdog import WATCHDOG, WatchedRun

MARK = "ROLLTAP_WORKSPACE"
SWEEPS = 20


@dataclass(frozen=True, slots=True)
class Share:
    """A run's limits on this machine. `folders` count towards its disk limit."""

    limits: Limits
    folders: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class TreeCommand:
    """The first process of a tree: its command, exactly its environment (with `MARK`), its folder, the text of its
    standard input, and the descriptors that it inherits. With `terminal` it has this process's input and output, with
    `pipes` those: input, output and error."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    stdin: str = ""
    pass_fds: tuple[int, ...] = ()
    terminal: bool = False
    pipes: tuple[int, int, int] | None = None


class TreeEnd(NamedTuple):
    """How a tree ended: the exit code of its first process (negative: the signal that ended it), or no code and
    `Ending.TIMED_OUT` after its timeout; and the limit that it exceeded ("": none)."""

    code: int | None
    ending: Ending | None
    excess: str


async def run_tree(command: TreeCommand, share: Share, *, out: Path, timeout: float) -> TreeEnd:
    """Runs `command`. `out` gets its output, and a line of ours if it exceeded a limit.

    No process of the run is alive when this returns or raises. Raises `RuntimeFailed` if the command can't start.
    """
    mark = f"{MARK}={command.env[MARK]}".encode()
    group = run_group(share.limits)
    try:
        with out.open("wb") as output, _readable(command.stdin) as standard_input:
            streams = (standard_input, output, output) if command.pipes is None else command.pipes
            stdin, stdout, stderr = (None, None, None) if command.terminal else streams
            process = await asyncio.create_subprocess_exec(
                *(group.enter(command.argv) if group else command.argv),
                env=dict(command.env),
                cwd=command.cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                pass_fds=command.pass_fds,
            )
    except OSError as error:
        end_tree(mark, group)
        if isinstance(error, FileNotFoundError):
            raise RuntimeFailed(f"no command {error.filename!r}; install it or add it to PATH") from error
        raise RuntimeFailed(f"can't start {command.argv[0]!r}: {error}") from error
    run = WatchedRun(process.pid, share.limits, (*share.folders, out), lambda: kill_group(process.pid))
    WATCHDOG.watch(run)
    code, ending = None, None
    try:
        async with asyncio.timeout(timeout):
            code = await process.wait()
    except TimeoutError:
        ending = Ending.TIMED_OUT
    finally:
        WATCHDOG.leave(run)
        kill_group(process.pid)
        excess = run.excess or (group.excess() if group else "")
        await asyncio.shield(asyncio.to_thread(end_tree, mark, group))
        await process.wait()
        if excess:
            with suppress(OSError), out.open("ab") as output:  # the run's disk may be full
                output.write(f"\nrolltap: this run took more than its share: {excess}\n".encode())
    return TreeEnd(code, ending, excess)


@contextmanager
def _readable(text: str) -> Iterator[IO[bytes]]:
    """A file with `text`. Unlike a pipe it can't fill up or break if the command does not read all of it."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_tree(mark: bytes, group: RunGroup | None) -> None:
    """Ends every process of a run, and removes its cgroup."""
    if group is not None:
        group.kill()
    kill_marked(mark)
    if group is not None:
        group.close()


def kill_marked(mark: bytes) -> None:
    """Kills every process with `mark` in its environment. Repeats until a sweep finds none, at most `SWEEPS` times."""
    for _ in range(SWEEPS):
        pids = marked(mark)
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: bytes) -> list[int]:
    """The processes (except zombies) with `mark` in their environment."""
    pids = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                environment = Path(entry.path, "environ").read_bytes()
                if mark in environment.split(b"\0"):
                    pids.append(int(entry.name))
    return pids
