"""The `process` runtime: own HOME, working copy, process group, rlimits, cleaned environment.

It isolates honest agents from each other and ends their processes. It does not stop a hostile one (`bubblewrap.py`).

`run_tree` runs a command and ends its whole process tree, including daemons that left its group and session. Every
process of a run inherits the environment variable `ROLLTAP_WORKSPACE`, and in this runtime a number as its limit of
file locks, which Linux does not use: databases overwrite their environment by a title, other daemons empty it. Ending a
run kills its process group, then the group of every process with one of these marks, until there is none, and orphans
that lowered the limit to a number of no run. (Linux only: the marks are read from `/proc`.) A run with a cgroup of its
own is killed through it before the search for the marks.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import resource
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, NamedTuple, Self

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import (
    Command,
    Ending,
    Exit,
    Launch,
    Limits,
    RunOutput,
    RuntimeOptions,
    Source,
    refuse_image,
)
from rolltap.harnesses.runtimes.cgroup import RunGroup, run_group
from rolltap.harnesses.runtimes.folders import Folders, FolderWorkspace, make_folders
from rolltap.harnesses.runtimes.left_runs import end_left_processes, is_running, runner_identity
from rolltap.harnesses.runtimes.watchdog import RLIMIT_LOCKS, WATCHDOG, WatchedRun
from rolltap.harnesses.threads import in_thread

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def clean_environment(home: Path, tmp: Path, path: str) -> dict[str, str]:
    """The environment of a run, in place of the runner's."""
    return {
        "HOME": str(home),
        "PATH": path,
        "TMPDIR": str(tmp),
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "CI": "1",
        "NO_COLOR": "1",
        "NO_PROXY": "*",
    }


def limited(argv: tuple[str, ...], limits: Limits, tasks: int = 0, locks: int = 0) -> list[str]:
    """`argv` under `limits`, which a shell sets before it execs the command.

    The address space is not limited, as V8 reserves terabytes of it; its writable data is. `ulimit -f` counts 512-byte
    blocks (POSIX), `ulimit -d` 1,024 bytes. The watchdog counts processes. With `tasks` the kernel counts the user's
    processes and threads, too, so this is only for a run with a user namespace of its own. `locks` marks its processes.
    """
    settings = (
        f"ulimit -c 0; ulimit -f {limits.file_mb * 2048}; ulimit -n {limits.open_files}; "
        f"ulimit -d {limits.memory_mb * 1024}"
    )
    if tasks:  # -u in bash, -p in dash; if neither can be set, a lower limit already applies
        settings += f"; {{ ulimit -u {tasks} || ulimit -p {tasks}; }} 2>/dev/null"
    if locks:  # -x in bash, -w in dash
        settings += f"; {{ ulimit -x {locks} || ulimit -w {locks}; }} 2>/dev/null"
    return ["/bin/sh", "-c", f'{settings}; exec "$@"', "sh", *argv]


def terminal_environment(env: Mapping[str, str], launch: Command) -> dict[str, str]:
    """`env`, with this process's terminal where the launch takes it."""
    if not launch.terminal:
        return dict(env)
    kept = {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}
    return {**{name: value for name, value in env.items() if name not in ("CI", "NO_COLOR", "TERM")}, **kept}


class ProcessWorkspace(FolderWorkspace):
    runtime = "process"

    def __init__(self, folders: Folders, path: str) -> None:
        super().__init__(folders)
        self._path = path
        self._mark = new_mark()

    async def run(self, launch: Launch, limits: Limits, timeout: float, *, reach: str = "") -> Exit:
        if not isinstance(launch, Command):
            raise TaskInvalid("the runtime 'process' runs commands only; use 'thread' for a Python call")
        if launch.mounts:
            paths = ", ".join(launch.mounts)
            raise TaskInvalid(
                f"the runtime {self.runtime!r} can't show folders at {paths}; use 'bubblewrap' or 'docker'"
            )
        if shutil.which(launch.argv[0], path=launch.env.get("PATH", self._path)) is None:
            raise RuntimeFailed(f"no command {launch.argv[0]!r}; `rolltap harness install` gets the ones we know")
        self._folders.write_home(launch.files)
        env: Mapping[str, str] = {
            **terminal_environment(clean_environment(self.home, self._folders.tmp, self._path), launch),
            **launch.env,
            MARK: self._mark,
        }
        argv = limited(launch.argv, limits, locks=locks_of(f"{MARK}={self._mark}".encode()))
        command = TreeCommand(argv, env, self.folder, launch.stdin, terminal=launch.terminal)
        share = Share(limits, (self.folder, self.home_folder, self._folders.tmp))
        out, started = await self.new_output(), time.monotonic()
        code, ending, excess = await run_tree(command, share, out=out, timeout=timeout)
        seconds = time.monotonic() - started
        return Exit(ending or launch.ending(code), seconds, code, out.text(), excess)


@dataclass(frozen=True, slots=True)
class ProcessRuntime:
    """`base`: the folder of the workspaces. `bins`: put before the system's PATH (installed harnesses)."""

    base: Path | None = None
    bins: tuple[Path, ...] = ()
    name: str = "process"
    launches: ClassVar[type[Launch]] = Command

    @classmethod
    def create(cls, options: RuntimeOptions) -> Self:
        refuse_image("process", options.image)
        return cls(options.base, options.bins)

    async def prepare(self, source: Source) -> ProcessWorkspace:
        await in_thread(end_left_processes, MARK)
        path = os.pathsep.join([*map(str, self.bins), SYSTEM_PATH])
        return ProcessWorkspace(await make_folders(self.base, source), path)


MARK = "ROLLTAP_WORKSPACE"
"""Variable of a run's processes: its runner's identity (`left_runs`), a dot, and what is the run's own."""
SWEEPS, QUIET = 100, 3
LOOKS, NEXT = 20, 6


def new_mark() -> str:
    return f"{runner_identity()}.{secrets.token_hex(8)}"


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


async def run_tree(command: TreeCommand, share: Share, *, out: RunOutput, timeout: float) -> TreeEnd:
    """Runs `command`. `out` gets its output, and a line of ours if it exceeded a limit.

    No process of the run is alive when this returns or raises. Raises `RuntimeFailed` if the command can't start.
    """
    mark = f"{MARK}={command.env[MARK]}".encode()
    group = run_group(share.limits)
    UNDER_WAY[mark] = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        with _readable(command.stdin) as standard_input:
            streams = (standard_input, out.descriptor, out.descriptor) if command.pipes is None else command.pipes
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
    folders = (*share.folders, out.path)
    run = WatchedRun(process.pid, share.limits, folders, lambda: kill_group(process.pid), locks_of(mark))
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
            with suppress(OSError):  # the run's disk may be full
                out.append(f"\nrolltap: this run took more than its share: {excess}\n")
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
    UNDER_WAY.pop(mark, None)


def kill_marked(mark: bytes) -> None:
    """Kills the groups of the processes that `marked` finds, until a sweep finds none. If processes began meanwhile, it
    hunts until `QUIET` rounds find none: what forks and ends at once is gone before a sweep comes to it."""
    newest = _newest()
    for _ in range(SWEEPS):
        if not _killed(marked(mark)):
            break
        time.sleep(0.01)
    quiet = 0
    for _ in range(SWEEPS):
        before, newest = newest, _newest()
        if quiet == QUIET or newest == before:
            return
        quiet = 0 if _killed(_hunted(locks_of(mark))) else quiet + 1


def _killed(pids: Iterable[int]) -> bool:
    any_killed = False
    for pid in pids:
        any_killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(os.getpgid(pid), signal.SIGKILL)
    return any_killed


UNDER_WAY: dict[bytes, float] = {}
"""The marks of this process's runs, and when they began, in seconds since the machine did."""
TICKS = os.sysconf("SC_CLK_TCK")


def locks_of(mark: bytes) -> int:
    """The number that marks the processes of a run beside their environment."""
    return int.from_bytes(hashlib.sha256(mark).digest()[:7])


def marked(mark: bytes) -> Iterator[int]:
    """The processes (except zombies) of the run with `mark`, by their environment or their limit of file locks, newest
    first; and orphans of any run that hide: with a lower limit than this process's, but the number of no run."""
    number, own = locks_of(mark), _limit_of_locks(os.getpid())
    known, lower = set(UNDER_WAY), dict[int, float]()
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), reverse=True):
        locks, marks = _limit_of_locks(pid), _marks(pid)
        if (locks == number and _lives(pid)) or mark in marks:
            yield pid
        else:
            known.update(marks)
            if locks < own:
                lower[pid] = locks
    numbers = {locks_of(each) for each in known if each in UNDER_WAY or _is_of_another_runner(each)} if lower else ()
    if hiding := [pid for pid, locks in lower.items() if locks not in numbers and _lives(pid)]:
        yield from _orphans(hiding)


def _hunted(number: int) -> Iterator[int]:
    """The processes with this limit of file locks, first among the newest, and the next ones, while it looks."""
    for _ in range(LOOKS):
        newest = _newest()
        yield from _with_limit(number, range(newest - 1, newest + NEXT))
    yield from _with_limit(number, map(int, filter(str.isdigit, os.listdir("/proc"))))


def _with_limit(number: int, pids: Iterable[int]) -> Iterator[int]:
    return (pid for pid in pids if _limit_of_locks(pid) == number and _lives(pid))


def _newest() -> int:
    return int(Path("/proc/loadavg").read_bytes().split()[-1])


def _marks(pid: int) -> list[bytes]:
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return [each for each in variables if each.startswith(f"{MARK}=".encode())]
    return []


def _limit_of_locks(pid: int) -> float:
    """Infinite without a limit, and of a process that is gone or another user's."""
    with suppress(OSError):
        if (locks := resource.prlimit(pid, RLIMIT_LOCKS)[1]) != resource.RLIM_INFINITY:
            return locks
    return math.inf


def _is_of_another_runner(mark: bytes) -> bool:
    """Whether it is the mark of a run of another process. That one knows its runs, and ends what hides there."""
    identity = mark.decode(errors="replace").partition("=")[2].rpartition(".")[0]
    return identity != runner_identity() and is_running(identity)


ORPHAN = """(while read -r _ _ _ parent _ < /proc/self/stat; [ "$parent" = $$ ]; do :; done; echo "$parent") &"""
"""Prints the process that gets this one's orphans: the first of all, or one above this that asked for them."""


def _orphans(pids: Collection[int]) -> Iterator[int]:
    """Those that are orphans of this user, and began since a run did that is under way."""
    parent = subprocess.run(("/bin/sh", "-c", ORPHAN), stdout=subprocess.PIPE, check=False).stdout.strip()
    began = (min(UNDER_WAY.values(), default=math.inf) * TICKS) - 1
    for pid in pids:
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            status = Path(f"/proc/{pid}/status").read_bytes()
            if fields[1] == parent and int(fields[19]) >= began and b"\nUid:\t%d\t" % os.getuid() in status:
                yield pid


def _lives(pid: int) -> bool:
    """Whether any thread of a process lives: the first may have ended, which hides the environment as well."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                if (thread / "stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    return True
    return False
