"""Reads, compares, copies and removes the files that an agent left in its working copy and HOME, as hostile files.

`LeftFiles` opens only regular files, follows no link and limits all sizes. Changes are found by comparing two folders
file by file. git is not run, because a repository's configuration can name programs that it would start. Links are
compared as links, and files by content, since an agent can set size and time. Copies keep holes and drop the rights of
other users. Files are parsed in the reader processes (`read_untrusted`), never in the runner.
"""

from __future__ import annotations

import errno
import filecmp
import io
import logging
import os
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from heapq import merge
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import msgspec

from rolltap.errors import LogUnreadable, Unreadable
from rolltap.untrusted import ReaderServer

P = ParamSpec("P")
T = TypeVar("T")

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

    def read_up_to(self, path: str, most: int) -> bytes | None:
        """The bytes of the regular file `path`; None if there is none, or of more than `most` bytes."""
        try:
            file = self.open(path)
        except OSError:
            return None
        if file is None:
            return None
        with file:
            data = file.read(most + 1)
        return data if len(data) <= most else None

    def replace(self, name: str, data: bytes) -> None:
        """Puts a new file in the place of the file or link `name` of the root itself. Raises `OSError`, also for a
        folder there. The file is made beside the root, where no process of the agent's is."""
        descriptor, new = tempfile.mkstemp(dir=self.root.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                os.fchmod(file.fileno(), 0o644)
            folder = self._folder("")
            try:
                os.replace(new, name, dst_dir_fd=folder)
            finally:
                os.close(folder)
        except OSError:
            os.unlink(new)
            raise

    def is_link(self, path: str) -> bool:
        """Whether `path` is a link. One that is gone, or reached by a link, is none."""
        try:
            return bool(self.link(path))
        except OSError:
            return False

    def names(self, path: str) -> int:
        """How many names the file `path` has; 0 if it is gone, or reached by a link."""
        try:
            folder = self._folder(path.rpartition("/")[0])
        except OSError:
            return 0
        try:
            status = os.stat(path.rpartition("/")[2], dir_fd=folder, follow_symlinks=False)
        except OSError:
            return 0
        finally:
            os.close(folder)
        return 0 if stat.S_ISDIR(status.st_mode) else status.st_nlink

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

    def allow(self, path: str) -> None:
        """Gives the owner of the folder `path` all rights to it. Raises `OSError`, also for a link on the way."""
        outer, _, name = path.rpartition("/")
        folder = self._folder(outer) if name else None
        try:
            descriptor = os.open(name or self.root, os.O_PATH | _FOLDER, dir_fd=folder)
        finally:
            if folder is not None:
                os.close(folder)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            if mode & stat.S_IRWXU != stat.S_IRWXU:  # `fchmod` takes no such descriptor
                os.chmod(f"/proc/self/fd/{descriptor}", mode | stat.S_IRWXU)
        finally:
            os.close(descriptor)

    def remove_empty(self, path: str) -> None:
        """Removes the empty file or folder `path`; a link is neither. Raises `OSError`, also for a link on the way."""
        folder, name = self._folder(path.rpartition("/")[0]), path.rpartition("/")[2]
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(name, dir_fd=folder)
            elif stat.S_ISREG(status.st_mode) and status.st_size == 0:
                os.unlink(name, dir_fd=folder)
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

    def entries(self, path: str) -> Generator[tuple[str, os.stat_result], None, None]:
        """The path and status of each entry of a folder; nothing if it is not a folder, or reached by a link.

        What can't be read is left out: entries that are gone meanwhile, or of a folder that may not be searched.
        """
        try:
            descriptor = self._folder(path)
        except OSError:
            return
        try:
            with suppress(OSError), os.scandir(descriptor) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    yield f"{path}/{entry.name}", status
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


MOST_BYTES = 4 << 30
MOST_FILES = 200_000
"""The most data and files of an agent that are copied into a clean workspace."""

MOST_LISTED, DEEPEST = 2_000_000, 100
MOST_PATHS = 256 << 20
"""The most characters that the paths of all listed entries have."""
MOST_STEPS = 4_000_000
"""The most folders that are opened on the way, as no link is followed: each folder and each copied file costs its
depth."""

UNSEEN = {".git", "__pycache__", ".pytest_cache", "node_modules", ".venv"}
"""Folders that are not compared: those of builds and tools."""


def copy_out(left: LeftFiles, target: Path, budget: CopyBudget) -> None:
    """Copies the regular files and folders of the root into the folder `target`, over files that are there; nothing
    that is more than `DEEPEST` deep. Raises `Unreadable` if the budget is used up."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        budget.files -= 1
        if budget.files < 0:
            raise Unreadable("the agent left more folders than may be copied")
        (target / folder[1:]).mkdir(parents=True, exist_ok=True)
        for path, status in left.entries(folder):
            if stat.S_ISDIR(status.st_mode) and path.count("/") <= DEEPEST:
                waiting.append(path)
            elif stat.S_ISREG(status.st_mode):
                (target / path[1:]).unlink(missing_ok=True)
                budget.copy(left, path, target / path[1:])


class ChangeKind(StrEnum):
    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Change:
    path: str
    kind: ChangeKind


def changes(before: Path, after: Path) -> list[Change]:
    """The files and links that differ, by path."""
    old, new = file_states(before).keys(), file_states(after).keys()
    differing = [Change(path, ChangeKind.ADDED) for path in new - old]
    differing += [Change(path, ChangeKind.DELETED) for path in old - new]
    differing += [Change(path, ChangeKind.MODIFIED) for path in old & new if not _same(before / path, after / path)]
    return in_order(differing, attrgetter("path"))


SORTED_AT_ONCE = 20_000


def in_order(items: Iterable[T], key: Callable[[T], str]) -> list[T]:
    """`sorted` for as many items as an agent likes: other threads, such as the one that sends heartbeats, can run."""
    waiting = iter(items)
    parts = list[list[T]]()
    while part := list(islice(waiting, SORTED_AT_ONCE)):
        parts.append(sorted(part, key=key))
    return list(merge(*parts, key=key))


def apply_changes(
    every: Iterable[Change],
    after: Path,
    target: Path,
    brings: Callable[[str, bool], bool] = lambda path, is_link: True,
    budget: CopyBudget | None = None,
) -> list[Change]:
    """Applies to `target` the changes that `brings` accepts, by their path and if they are links, but none through
    a link outward. What becomes a link, or none, after `brings` was asked is not applied, as code may run in `after`.

    Returns the changes that were not applied. Raises `Unreadable` for more than `budget` (`MOST_BYTES`, `MOST_FILES`)
    or `MOST_STEPS`, and for what can't lie in the target, such as a file in a file's place.
    """
    budget = budget or CopyBudget(MOST_BYTES, MOST_FILES)
    left, dropped, root = LeftFiles(after), list[Change](), target.resolve()
    parent, is_inside = target, True  # of one folder's files only the first looks where that is
    steps = 0
    for change in every:
        destination = target / change.path
        if destination.parent != parent:
            parent = destination.parent
            is_inside = parent.resolve().is_relative_to(root)  # whatever links there are
        is_link = change.kind is not ChangeKind.DELETED and left.is_link(change.path)
        if not is_inside or not brings(change.path, is_link):
            dropped.append(change)
            continue
        steps += change.path.count("/")
        if steps > MOST_STEPS:
            raise Unreadable("the agent's changes lie in too many folders")
        try:
            if destination.is_symlink() or destination.is_file():
                destination.unlink()
            if change.kind is not ChangeKind.DELETED:
                _make_folder(destination.parent, target)
                if is_link:
                    destination.symlink_to(left.link(change.path))
                else:
                    budget.copy(left, change.path, destination)
        except OSError as error:
            raise Unreadable(f"{change.path} can't be taken over: {error.strerror}") from error
    return dropped


def _make_folder(folder: Path, root: Path) -> None:
    """Makes a folder below `root` with those above it, but never `root`, which may be removed meanwhile."""
    if folder == root:
        return
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        if folder.parent == root:
            raise
        _make_folder(folder.parent, root)
        folder.mkdir(exist_ok=True)


FileState = tuple[int, int, int]
"""The inode, the time of its last change, which nobody can set, and the size of a file or link."""


def file_states(folder: Path) -> dict[str, FileState]:
    """The files and links below `folder`, but for folders that are not compared. It may change meanwhile.

    Raises `Unreadable` for more than `MOST_LISTED` entries, `MOST_PATHS` or `MOST_STEPS`.
    """
    left, found, waiting = LeftFiles(folder), dict[str, FileState](), [""]
    looked_at = characters = steps = 0
    while waiting:
        for path, status in left.entries(waiting.pop()):
            looked_at += 1
            if looked_at > MOST_LISTED:
                raise Unreadable(f"the working copy has more than {MOST_LISTED:,} files")
            characters += len(path)
            if characters > MOST_PATHS:
                raise Unreadable(f"the paths of the working copy have more than {MOST_PATHS >> 20} MB")
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                found[path[1:]] = (status.st_ino, status.st_ctime_ns, status.st_size)
            elif stat.S_ISDIR(status.st_mode) and path.rpartition("/")[2] not in UNSEEN and path.count("/") < DEEPEST:
                steps += path.count("/")
                if steps > MOST_STEPS:
                    raise Unreadable("the working copy has too many folders, or too deep ones")
                waiting.append(path)
    return found


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    first, second = one.stat(), other.stat()
    if (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino):  # of one overlay's base
        return True
    return first.st_mode == second.st_mode and filecmp.cmp(one, other, shallow=False)


log = logging.getLogger("rolltap.runner")

CHANGEABLE = ("-type", "d,f", "-execdir", "chattr", "-f", "-ia", "{}", "+")
"""Arguments of `find`, which goes into folders of any depth."""


def remove(path: Path) -> None:
    """Removes a file or a folder with all that is in it; links are removed, not followed. Never raises: a removal
    that fails is the agent's doing, and logged.

    Python's own removal goes one call deeper with each folder, which an agent can nest as it likes. The name goes
    first, so that work on the folder that still goes on in a thread ends with an error, and makes nothing anew. Root's
    agent may have made files immutable.
    """
    if not os.path.lexists(path):
        return
    with suppress(OSError):  # most are ordinary files
        os.unlink(path)
        return
    with suppress(OSError):  # a mount can't be renamed
        path = path.rename(path.with_name(f"{path.name[:200]}-{secrets.token_hex(8)}"))
    removal = ("rm", "-rf", "--", place := str(path))
    for command in (removal, ("chmod", "-R", "u+rwX", "--", place), removal, ("find", place, *CHANGEABLE), removal):
        subprocess.run(command, capture_output=True, check=False)
        if not os.path.lexists(path):
            return
    log.error("%s can't be removed: remove it by hand", path)


MODULES = (
    "rolltap.harnesses.runner.tampering_scan",
    "rolltap.harnesses.logs.check",
    "sqlite3",
)
READERS = ReaderServer(MODULES)
EVALUATIONS_READERS = ReaderServer(("rolltap.harnesses.evaluators.pytest_check",))


async def read_untrusted(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns `function(*args)`, run by a reader process: see `ReaderServer.ask`."""
    return await READERS.ask(function, *args, **kwargs)


async def read_for_evaluation(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`read_untrusted` by other processes: an evaluation, whose time is limited, waits for no agent's workspace."""
    return await EVALUATIONS_READERS.ask(function, *args, **kwargs)
