"""What a killed runner left behind is ended by the next one on its machine.

A runner that is killed (`kill -9`) can end nothing. Its runs bear its identity: a container as a label, a process in
its environment. Only runs of the same user, since the same start of the machine and in the same namespace of processes
are looked at: of others this process can't tell whether their runner lives.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

UNKNOWN = "unknown"
"""The identity where there is no `/proc`: nothing is ended by it."""


def runner_identity() -> str:
    """This process, unlike any other one, as letters, digits, `-` and `.`."""
    try:
        return f"{_place()}.{os.getpid()}.{_started(os.getpid())}"
    except OSError:
        return UNKNOWN


def is_left(identity: str) -> bool:
    """Whether the runner with this identity has ended on this machine."""
    place, _, process = identity.rpartition(".")[0].rpartition(".")
    with suppress(OSError, ValueError):
        return place == _place() and _started(int(process)) != identity.rpartition(".")[2]
    return False


def is_running(identity: str) -> bool:
    """Whether the runner with this identity runs on this machine, as whichever user."""
    place, _, started = identity.rpartition(".")
    with suppress(OSError, ValueError):
        machine, _, process = place.rpartition(".")
        is_here = machine.rpartition(".")[0] == _place().rpartition(".")[0]
        return is_here and bool(started) and _started(int(process)) == started
    return False


def end_left_processes(mark: str) -> None:
    """Kills the processes whose variable `mark` is the identity of a runner that has ended, and a part behind it."""
    beginning = f"{mark}=".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                for variable in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    identity = variable.removeprefix(beginning).decode(errors="replace").rpartition(".")[0]
                    if variable.startswith(beginning) and is_left(identity):
                        os.kill(int(entry.name), signal.SIGKILL)


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}.{os.getuid()}"


def _started(pid: int) -> str:
    """When a process started, in ticks since the machine did; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
