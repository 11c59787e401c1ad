"""The `bubblewrap` runtime: a read-only system, a private file system, and a network that reaches only the proxy.

The agent sees the system's `/usr`, the installed harnesses, its working copy at `/workspace`, its HOME and an empty
`/tmp` of a fixed size. It has its own process, IPC, host-name and network namespaces, no capabilities and no new user
namespaces. It does not see other rollouts, the database, the runner's environment or its processes. The sandbox ends
with its first process. It needs no root if user namespaces are allowed.

A seccomp filter refuses, with EPERM, system calls that agents don't need: those with a large kernel attack surface
(io_uring, bpf, perf, keyrings, userfaultfd, modules), and those for mounts, clocks and namespaces. It is classic BPF,
built here: load the architecture, load the number, compare. All calls of another architecture than the machine's own,
and of x32, are refused. System V shared memory and semaphores, which exist while no process uses them, must be small. A
debugger may attach to any process but the first, which could be told to outlive the run.
Source: Linux, `include/uapi/linux/seccomp.h`, `arch/x86/entry/syscalls/syscall_64.tbl`, `asm-generic/unistd.h`.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, ClassVar, Self

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Command, Endpoint, Exit, Launch, Limits, RuntimeOptions, Source, refuse_image
from rolltap.harnesses.runtimes.cgroup import task_limit
from rolltap.harnesses.runtimes.code_sandbox import Pipes
from rolltap.harnesses.runtimes.disk import is_full, limited_disk
from rolltap.harnesses.runtimes.folders import Folders, FolderWorkspace, make_folders
from rolltap.harnesses.runtimes.process import (
    MARK,
    SYSTEM_PATH,
    Share,
    TreeCommand,
    clean_environment,
    limited,
    run_tree,
    terminal_environment,
)
from rolltap.harnesses.runtimes.relay import HANDOFF, Relay, Target
from rolltap.harnesses.runtimes.shown import Mount, bind_options, check_shown, remove_places

WORKDIR = Path("/workspace")
HOME = Path("/home/agent")
AGENT_ID = 1000
INTERPRETER = os.path.realpath(sys.executable)
"""Runs the handoff in the sandbox, which mounts Python's folder for it."""

SYSTEM = (
    *("--ro-bind", "/usr", "/usr"),
    *("--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    *("--ro-bind-try", "/etc/ssl", "/etc/ssl", "--ro-bind-try", "/etc/ca-certificates", "/etc/ca-certificates"),
    *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--ro-bind-try", "/etc/localtime", "/etc/localtime"),
    *("--proc", "/proc", "--dev", "/dev", "--dir", "/run"),
)
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""What bwrap shows of the machine's `/dev`."""
WALLS = (
    *("--unshare-all", "--unshare-user", "--uid", str(AGENT_ID), "--gid", str(AGENT_ID)),
    *("--disable-userns", "--cap-drop", "ALL", "--hostname", "rollout", "--new-session", "--die-with-parent"),
)
ETC = {
    "passwd": f"agent:x:{AGENT_ID}:{AGENT_ID}:agent:{HOME}:/bin/bash\n",
    "group": f"agent:x:{AGENT_ID}:\n",
    "hosts": "127.0.0.1 localhost rollout\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


STATUS_AT_END = b'"exit-code"'
"""bwrap writes it, outside the sandbox, if a command ran in it: what a command prints and returns says nothing."""


class BubblewrapWorkspace(FolderWorkspace):
    runtime = "bubblewrap"
    interpreter = f"{INTERPRETER} -ISB"

    def __init__(self, folders: Folders, path: str, shown: Sequence[Path]) -> None:
        super().__init__(folders, WORKDIR, HOME)
        self._path = path
        self._shown = shown
        self.hidden: Sequence[Path] = ()  # files and folders of the working copy that look empty, relative to it
        self.read_only: Sequence[Mount] = ()  # places of the working copy
        self.pipes: Pipes | None = None  # of its commands, in place of a file
        self.is_spread = False
        self._mark = secrets.token_hex(8)

    def spread(self, folder: Path, workdir: Path) -> None:
        """Makes `folder` the working copy. Its folders are seen below `/` under their own names; `workdir` is in one
        of them. Commands begin in `/`."""
        self.folder, self.workdir, self.is_spread = folder, workdir, True

    @property
    def places(self) -> Mapping[Path, Path]:
        if not self.is_spread:
            return super().places
        return {Path("/", entry.name): entry for entry in sorted(self.folder.iterdir())}

    def endpoint(self, endpoint: Endpoint) -> Endpoint:
        return Target.of(endpoint.base_url).inside(endpoint)

    async def run(self, launch: Launch, limits: Limits, timeout: float, *, reach: str = "") -> Exit:
        if not isinstance(launch, Command):
            raise TaskInvalid("the runtime 'bubblewrap' runs commands only; use 'thread' for a Python call")
        self._folders.write_home(launch.files)
        env = {
            **terminal_environment(clean_environment(HOME, Path("/tmp"), self._path), launch),
            **launch.env,
            MARK: self._mark,
        }
        inner = limited(launch.argv, limits, task_limit(limits))
        out, started = await self.new_output(), time.monotonic()
        async with AsyncExitStack() as stack:
            descriptors: tuple[int, ...] = ()
            if reach:
                target = Target.of(reach)
                ours, theirs = socket.socketpair()
                stack.callback(theirs.close)
                await stack.enter_async_context(Relay(ours, target))
                handoff = [INTERPRETER, "-I", "-S", "-c", HANDOFF, str(theirs.fileno()), str(target.inner_port)]
                inner = [*handoff, *inner]
                descriptors = (theirs.fileno(),)
            status = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
            guard = ["--json-status-fd", str(status.fileno())]
            descriptors = (*descriptors, status.fileno())
            if (calls := filter_file()) is not None:
                stack.enter_context(calls)
                guard += ["--seccomp", str(calls.fileno())]
                descriptors = (*descriptors, calls.fileno())
            command = TreeCommand(
                [*self._walls(launch.mounts, limits, stack.enter_context(own_devices())), *guard, "--", *inner],
                env=env,
                cwd=self._folders.root,
                stdin=launch.stdin,
                pass_fds=descriptors,
                terminal=launch.terminal,
                pipes=self.pipes,
            )
            share = Share(limits, (self.folder, self._folders.home, *launch.mounts.values()))
            stack.callback(remove_places, self.folder, self.read_only)
            with limited_disk(self._folders.root, limits.disk_mb):
                code, ending, excess = await run_tree(command, share, out=out, timeout=timeout)
                if not excess and is_full(self._folders.root):
                    excess = f"over {limits.disk_mb} MB of disk"
            status.seek(0)
            began = STATUS_AT_END in status.read()
        seconds = time.monotonic() - started
        output = out.text()
        if ending is None and not excess and code == 1 and not began:
            raise RuntimeFailed(
                f"bubblewrap could not make the sandbox: {output.strip()[:300]}; allow user namespaces on this machine "
                "(sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces), or use the runtime 'process'"
            )
        return Exit(ending or launch.ending(code), seconds, code, output, excess)

    def beside(self, folders: Folders, pipes: Pipes) -> BubblewrapWorkspace:
        inner = BubblewrapWorkspace(folders, self._path, self._shown)
        inner.pipes, inner.workdir, inner.is_spread = pipes, self.workdir, self.is_spread
        return inner

    def _walls(self, mounts: Mapping[str, Path], limits: Limits, devices: Sequence[str]) -> list[str]:
        size = ("--size", str(limits.scratch_mb << 20), "--tmpfs")  # else half of the machine's memory
        argv = [shutil.which("bwrap") or "bwrap", *WALLS, *size, "/", *SYSTEM]  # never a harness's own copy of bwrap
        for folder in SCRATCH:
            argv += [*size, folder]
        argv += [*devices, "--remount-ro", "/dev", "--remount-ro", "/proc"]  # root's sandboxes may write /proc/sys
        for name, text in ETC.items():
            path = self._folders.root / f"etc-{name}"
            path.write_text(text)
            argv += ["--ro-bind", str(path), f"/etc/{name}"]
        for path in self._shown:
            is_link = path.is_symlink() and path.is_file()  # a program finds what it imports beside its real file
            argv += ["--symlink", str(path.resolve()), str(path)] if is_link else ["--ro-bind", str(path), str(path)]
        for inside, folder in {**self.places, HOME: self._folders.home, **mounts}.items():
            argv += ["--bind", str(folder), str(inside)]
        argv += bind_options(self.folder, WORKDIR, self.read_only, self._folders.root)
        for path in self.hidden:
            place = str(WORKDIR / path)
            is_folder = (self.folder / path).is_dir()
            argv += ["--tmpfs", place, "--remount-ro", place] if is_folder else ["--ro-bind", "/dev/null", place]
        return [*argv, "--chdir", "/" if self.is_spread else str(WORKDIR)]


@contextmanager
def own_devices() -> Iterator[list[str]]:
    """bwrap's options for device files of a sandbox's own, where root runs it: it owns the machine's, and could change
    their modes for everybody. None for other users, and where root may make none. They are in `/dev`, as elsewhere
    device files may have no effect."""
    with ExitStack() as stack:
        options: list[str] = []
        if os.geteuid() == 0:
            with suppress(OSError):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolltap-", dir="/dev")))
                for name in DEVICES:
                    own, device = folder / name, f"/dev/{name}"
                    os.mknod(own, stat.S_IFCHR, os.stat(device).st_rdev)
                    own.chmod(0o666)
                    options += ["--dev-bind", str(own), device]
        yield options


@cache
def refusal() -> str:
    """Why this machine can't make a sandbox, in bwrap's words; "" if it can. Starts one sandbox to find out."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    result = subprocess.run(["bwrap", *WALLS, *SYSTEM, "--", "/bin/true"], capture_output=True, text=True, check=False)
    return result.stderr.strip() or f"bwrap ended with {result.returncode}" if result.returncode else ""


@dataclass(frozen=True, slots=True)
class BubblewrapRuntime:
    """`base`: the folder of the workspaces. `bins`: put before the system's PATH. `shown`: visible in the sandbox."""

    base: Path | None = None
    bins: tuple[Path, ...] = ()
    shown: tuple[Path, ...] = ()
    name: str = "bubblewrap"
    launches: ClassVar[type[Launch]] = Command

    @classmethod
    def create(cls, options: RuntimeOptions) -> Self:
        refuse_image("bubblewrap", options.image)
        return cls(options.base, options.bins, options.needs)

    def __post_init__(self) -> None:
        if shutil.which("bwrap") is None:
            raise RuntimeFailed("bwrap is not installed; apt install bubblewrap, or use the runtime 'process'")
        for path in self.shown:
            check_shown(path)

    async def prepare(self, source: Source) -> BubblewrapWorkspace:
        path = os.pathsep.join([*map(str, self.bins), SYSTEM_PATH])
        visible_folders = tuple(dict.fromkeys([Path(sys.base_prefix), *self.shown]))
        return BubblewrapWorkspace(await make_folders(self.base, source, own_disk=True), path, visible_folders)


BOTH = (*range(425, 428), *range(428, 434), 442)  # io_uring_*; open_tree to fspick; mount_setattr
REFUSED: dict[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (
            *(
                155,
                163,
                164,
                165,
                166,
                167,
                168,
                169,
                179,
            ),  # pivot_root acct settimeofday mounts swap reboot quotactl
            *(172, 173, 175, 176, 103, 227),  # iopl ioperm (de)init_module syslog clock_settime
            *(246, 248, 249, 250, 272, 298),  # kexec_load add_key request_key keyctl unshare perf_event_open
            *(300, 303, 304, 308, 310, 311, 313),  # fanotify_init *_handle_at setns process_vm_* finit_module
            *(320, 321, 323),  # kexec_file_load bpf userfaultfd
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(39, 40, 41, 60, 89, 97, 104, 105, 106, 112, 116),
            *(142, 170, 217, 218, 219, 224, 225, 241),
            *(262, 264, 265, 268, 270, 271, 273, 280, 282, 294),
        ),
    ),
}
"""By machine: its `AUDIT_ARCH`, and the numbers of the refused calls."""
SHMGET, SEMGET = {"x86_64": 29, "aarch64": 194}, {"x86_64": 64, "aarch64": 190}
MOST_SHARED, MOST_SEMAPHORES = 16 << 10, 32
"""The most bytes of a segment and semaphores of a set: a sandbox can make thousands. PostgreSQL needs few."""
PTRACE = {"x86_64": 101, "aarch64": 117}
FIRST_PROCESS = 1
"""The sandbox's own, which ends all others when its parent ends."""
SECOND_ARGUMENT = 24
"""Its place in `struct seccomp_data`: the lower half of it, then the upper one."""

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, DENY = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
X32 = 0x40000000


def program(machine: str) -> bytes:
    """The filter for a machine, as `struct sock_filter`s; empty if the machine is not in `REFUSED`."""
    if machine not in REFUSED:
        return b""
    arch, numbers = REFUSED[machine]
    refused = sorted({*BOTH, *numbers})
    by_argument = _only_small(SHMGET[machine], MOST_SHARED) + _only_small(SEMGET[machine], MOST_SEMAPHORES)
    by_argument += _never_with(PTRACE[machine], FIRST_PROCESS)
    last = len(refused) + len(by_argument)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 0, last + 3, arch), (LOAD, 0, 0, 0), (AT_LEAST, last + 1, 0, X32)]
    steps += [(EQUAL, last - index, 0, number) for index, number in enumerate(refused)]
    steps += [*by_argument, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _only_small(number: int, most: int) -> list[tuple[int, int, int, int]]:
    """Refuses the call `number` with a second argument over `most`."""
    return [
        (EQUAL, 0, 6, number),
        (LOAD, 0, 0, SECOND_ARGUMENT + 4),
        (EQUAL, 0, 2, 0),
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (AT_LEAST, 0, 1, most + 1),
        (RETURN, 0, 0, DENY),
        (RETURN, 0, 0, ALLOW),
    ]


def _never_with(number: int, second: int) -> list[tuple[int, int, int, int]]:
    """Refuses the call `number` with `second` as its second argument, of which the kernel takes the lower half."""
    return [
        (EQUAL, 0, 4, number),
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (EQUAL, 0, 1, second),
        (RETURN, 0, 0, DENY),
        (RETURN, 0, 0, ALLOW),
    ]


def filter_file() -> IO[bytes] | None:
    """An open file with the filter for this machine, at its beginning; None if there is no filter."""
    code = program(platform.machine())
    if not code:
        return None
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    file.write(code)
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return file
