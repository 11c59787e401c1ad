"""Reads files that an untrusted agent wrote: only regular files, no links followed, all sizes limited."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from rolltap.errors import LogUnreadable

MAX_BYTES = 64 << 20
"""The most bytes read below one root, over all files."""

MAX_FILES = 2_000
"""The most folder entries in one search."""

DEPTH = 6

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class LeftFiles:
    """The files below `root`: the HOME or the working copy of an ended run. `bytes_read`: so far, of all files."""

    root: Path
    bytes_read: int = 0

    def find(self, folder: str, suffix: str) -> list[str]:
        """The regular files below `folder` whose names end with `suffix`, oldest first; empty if it is not a folder.

        Raises `LogUnreadable` if there are more than `MAX_FILES` entries.
        """
        matches: list[tuple[float, str]] = []
        waiting, looked_at = [folder], 0
        while waiting:
            path = waiting.pop()
            for entry_path, status in self.entries(path):
                looked_at += 1
                if looked_at > MAX_FILES:
                    raise LogUnreadable(f"{folder} holds more than {MAX_FILES} files")
                if stat.S_ISDIR(status.st_mode) and entry_path.count("/") - folder.count("/") < DEPTH:
                    waiting.append(entry_path)
                elif stat.S_ISREG(status.st_mode) and entry_path.endswith(suffix):
                    matches.append((status.st_mtime, entry_path))
        return [path for _, path in sorted(matches)]

    def has(self, path: str) -> bool:
        """True if there is a file or anything else of this name."""
        folder, _, name = path.rpartition("/")
        return any(entry_path == f"{folder}/{name}" for entry_path, _ in self.entries(folder))

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises `LogUnreadable` for a link in the path, no regular file, or `MAX_BYTES` exceeded."""
        try:
            file = self.open(path)
            if file is None:
                raise LogUnreadable(f"{path} is not a regular file")
            with file:
                data = file.read(MAX_BYTES - self.bytes_read + 1)
        except OSError as error:
            raise LogUnreadable(f"{path} can't be read: {error.strerror}") from error
        self.bytes_read += len(data)
        if self.bytes_read > MAX_BYTES:
            raise LogUnreadable(f"{path}: the log has more than {MAX_BYTES >> 20} MB")
        return data

    def open(self, path: str) -> IO[bytes] | None:
        """The regular file `path`; None if it is something else. Raises `OSError`, also for a link in the path."""
        folder = self._folder(path.rpartition("/")[0])
        try:
            descriptor = os.open(path.rpartition("/")[2], _FILE, dir_fd=folder)
        finally:
            os.close(folder)
        file = os.fdopen(descriptor, "rb")
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return file
        file.close()
        return None

    def link(self, path: str) -> str:
        """Where the link `path` leads. Raises `OSError`, also for a link on the way."""
        folder = self._folder(path.rpartition("/")[0])
        try:
            return os.readlink(path.rpartition("/")[2], dir_fd=folder)
        finally:
            os.close(folder)

    def unlink(self, path: str) -> None:
        """Removes the file or link `path`. Raises `OSError`, also for a link on the way."""
        folder = self._folder(path.rpartition("/")[0])
        try:
            os.unlink(path.rpartition("/")[2], dir_fd=folder)
        finally:
            os.close(folder)

    def json(self, path: str) -> Any:
        """The file's JSON object. Raises `LogUnreadable` if it is none."""
        return _object(self.read(path), path)

    def lines(self, path: str) -> Iterator[dict[str, Any]]:
        """The JSON objects of the file's lines. A last line that was cut off is skipped."""
        for number, line in enumerate(io.BytesIO(self.read(path)), 1):
            if not line.strip():
                continue
            try:
                value = _object(line, f"{path}, line {number}")
            except LogUnreadable:
                if not line.endswith(b"\n"):
                    return
                raise
            yield value

    def _folder(self, path: str) -> int:
        """A descriptor of a folder below the root. No part of the path is followed if it is a link."""
        descriptor = os.open(self.root, _FOLDER)
        for part in filter(None, path.split("/")):
            outer = descriptor
            try:
                descriptor = os.open(part, _FOLDER, dir_fd=outer)
            finally:
                os.close(outer)
        return descriptor

    def entries(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """The path and status of each entry of a folder; nothing if it is not a folder, or reached by a link."""
        try:
            descriptor = self._folder(path)
        except OSError:
            return
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # gone meanwhile
                        yield f"{path}/{entry.name}", entry.stat(follow_symlinks=False)
        finally:
            os.close(descriptor)


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise LogUnreadable(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LogUnreadable(f"{where}: not a JSON object")
    return value
