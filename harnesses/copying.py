"""Copies files that an agent wrote: within a budget, with their holes, without rights of other users."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rolltap.errors import Unreadable
from rolltap.harnesses.logs.files import LeftFiles

PART_BYTES = 1 << 20
COPIED_MODE = 0o777
"""Bits of a file's mode that its copy has: no set-user-id, set-group-id or sticky bit."""


@dataclass(slots=True)
class CopyBudget:
    """The bytes and files that may still be copied. A file with holes counts by its data."""

    bytes: int
    files: int

    def copy(self, source: LeftFiles, path: str, target: Path) -> None:
        """Copies the regular file `path` of `source` to the new file `target`, with its times.

        Raises `Unreadable` if the budget is used up, or if it is no regular file, or reached by a link.
        """
        self.files -= 1
        if self.files < 0:
            raise Unreadable("the agent's changes have more files than may be copied")
        try:
            file = source.open(path)
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}") from error
        if file is None:
            raise Unreadable(f"{path} is no regular file")
        with file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode) & COPIED_MODE
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                self._copy_data(file.fileno(), descriptor, status.st_size)
                os.fchmod(descriptor, mode)
                os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(descriptor)

    def _copy_data(self, source: int, target: int, size: int) -> None:
        os.ftruncate(target, size)
        at = 0
        while at < size:
            try:
                start = os.lseek(source, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # the rest is a hole
                    return
                raise
            at = os.lseek(source, start, os.SEEK_HOLE)
            self._copy_range(source, target, start, min(at, size))

    def _copy_range(self, source: int, target: int, start: int, end: int) -> None:
        self.bytes -= end - start
        if self.bytes < 0:
            raise Unreadable("the agent's changes have more data than may be copied")
        while start < end and (part := os.pread(source, min(PART_BYTES, end - start), start)):
            os.pwrite(target, part, start)
            start += len(part)
