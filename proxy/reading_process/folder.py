"""Where the reading process's socket lies: a folder of this user's, which nobody else enters.

Its maker holds a lock on it, which the system lets go however the maker ends. So the next one to make such a folder can
tell those that were left behind by `kill -9` from those in use, also where processes don't see one another.
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
    """`lock` is the folder itself, open and locked."""

    path: Path
    lock: int

    @classmethod
    def make(cls) -> Self:
        """A new folder, when those without an owner are gone."""
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (lock := _locked(left)) is not None:
                cls(left, lock).remove()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            if (lock := _locked(path)) is not None:  # else another one has just taken it for left behind
                return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _locked(path: Path) -> int | None:
    """This folder's lock; None if it is another's: another process's, another user's, or no folder any more."""
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
