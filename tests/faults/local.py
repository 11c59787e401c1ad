"""`rolltap up --local` for tests: folders that Postgres's user may pass, and ports that nobody else takes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen

from rolltap.deployment.description import ports_from

from ..conftest import free_port

UPS: list[Popen[bytes]] = []
"""What the tests of this process have started."""


def processes_of(folder: Path) -> dict[int, str]:
    """The command lines of all processes that have the folder in theirs, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found |= {int(entry.name): line} if str(folder) in line else {}
    return found


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users may pass: Postgres does not run as root. pytest's own are closed.

    What still runs there ends with it.
    """
    folder = Path(tempfile.mkdtemp(prefix="rolltap-up-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        for pid in processes_of(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while UPS:
            UPS.pop().wait()
        shutil.rmtree(folder)


def free_ports() -> dict[str, int]:
    """A free port for every service."""
    return {name: free_port() for name in ports_from(1)}


def first_free_port() -> int:
    """The first of a row of ports that are the deployment's, as `--port` takes it."""
    while True:
        first = free_port()
        taken = {free_port() for _ in range(40)}
        if set(ports_from(first).values()) <= taken | {first}:
            return first
