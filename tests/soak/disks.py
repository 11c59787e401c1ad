"""Disks of a few hundred MB for the services of a soak, which can be full. Only root may mount one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

FILLER = "filler"


@contextmanager
def mounted(sizes_mb: Mapping[Path, int]) -> Iterator[None]:
    """A tmpfs of so many MB at each path, which is made if it isn't there."""
    done: list[Path] = []
    try:
        for path, size in sizes_mb.items():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            options = f"size={size}m,mode=0700"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
            done.append(path)
        yield
    finally:
        for path in done:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(folder: Path) -> None:
    """Leaves no byte on the disk of `folder`."""
    left = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with (folder / FILLER).open("ab") as filler:
        for piece in (left, 1 << 20, 4096):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(filler.fileno(), filler.tell(), piece)
                    filler.seek(piece, os.SEEK_CUR)


def clear(folder: Path) -> None:
    (folder / FILLER).unlink(missing_ok=True)
