"""`rolltap up --local` for tests: folders that Postgres's user may pass, and ports that nobody else takes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltap.deployment.description import ports_from

from ..conftest import free_port


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users may pass: Postgres does not run as root. pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="rolltap-up-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
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
