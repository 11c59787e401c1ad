"""The `process` runtime: own HOME, working copy, process group, rlimits, cleaned environment.

It isolates honest agents from each other and ends their processes. It does not stop a hostile one (`bubblewrap.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Command, Exit, Launch, Limits, RuntimeOptions, Source
from rolltap.harnesses.refusals import refuse_image
from rolltap.harnesses.runtimes.folders import Folders, FolderWorkspace, make_folders
from rolltap.harnesses.runtimes.tree import MARK, Share, TreeCommand, run_tree

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


def limited(argv: tuple[str, ...], limits: Limits, tasks: int = 0) -> list[str]:
    """`argv` under `limits`, which a shell sets before it execs the command.

    The address space is not limited, as V8 reserves terabytes of it; its writable data is. `ulimit -f` counts 512-byte
    blocks (POSIX), `ulimit -d` 1,024 bytes. The watchdog counts processes. With `tasks` the kernel counts the user's
    processes and threads, too, so this is only for a run with a user namespace of its own.
    """
    settings = (
        f"ulimit -c 0; ulimit -f {limits.file_mb * 2048}; ulimit -n {limits.open_files}; "
        f"ulimit -d {limits.memory_mb * 1024}"
    )
    if tasks:  # -u in bash, -p in dash; if neither can be set, a lower limit already applies
        settings += f"; {{ ulimit -u {tasks} || ulimit -p {tasks}; }} 2>/dev/null"
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
        self._mark = secrets.token_hex(8)

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
        command = TreeCommand(limited(launch.argv, limits), env, self.folder, launch.stdin, terminal=launch.terminal)
        share = Share(limits, (self.folder, self.home_folder, self._folders.tmp))
        started = time.monotonic()
        code, ending, excess = await run_tree(command, share, out=self._folders.out, timeout=timeout)
        seconds = time.monotonic() - started
        return Exit(ending or launch.ending(code), seconds, code, self._folders.output(), excess)


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
        path = os.pathsep.join([*map(str, self.bins), SYSTEM_PATH])
        return ProcessWorkspace(await make_folders(self.base, source), path)
