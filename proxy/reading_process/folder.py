"""The folder of the reading process's socket. It is this user's, and nobody else can enter it.

Its owner holds a lock on it, which the system releases however the owner ends. So the next process that makes such a
folder can tell folders that `kill -9` left behind from those in use, even if the processes do not see one another.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PREFIX = "rolltap-reading-"


@dataclass(frozen=True, slots=True)
class SocketFolder:
    """`lock` is the file descriptor of the folder, open and locked."""

    path: Path
    lock: int

    @classmethod
    def make(cls) -> Self:
        """Makes a new folder, after it has removed those without an owner."""
        for old_folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (lock := _try_lock(old_folder)) is not None:
                cls(old_folder, lock).remove()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            if (lock := _try_lock(path)) is not None:  # else another process has just taken it for abandoned
                return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _try_lock(path: Path) -> int | None:
    """Locks the folder and returns its file descriptor.

    Returns None if it belongs to another process or user, or is no folder any more.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.getuid() and os.fstat(lock).st_ino == os.stat(path).st_ino:
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
