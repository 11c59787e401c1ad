"""Finds an agent's changes in its working copy by comparing two folders file by file.

It does not run git, as a repository's configuration can name programs that git would start. Links are compared as links
and never followed. Files are compared by what is in them: size and time are the agent's to set.
"""

from __future__ import annotations

import filecmp
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rolltap.errors import Unreadable
from rolltap.harnesses.copying import CopyBudget
from rolltap.harnesses.logs.files import LeftFiles

MOST_BYTES = 4 << 30
MOST_FILES = 200_000
"""The most data and files of an agent that are copied into a clean workspace."""

MOST_LISTED, DEEPEST = 2_000_000, 500

UNSEEN = {".git", "__pycache__", ".pytest_cache", "node_modules", ".venv"}
"""Folders that are not compared: those of builds and tools."""


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
    return sorted(differing, key=lambda change: change.path)


def apply_changes(
    every: Iterable[Change],
    after: Path,
    target: Path,
    brings: Callable[[Change], bool] = lambda _: True,
    budget: CopyBudget | None = None,
) -> list[Change]:
    """Applies to `target` the changes that `brings` accepts, but none through a link outward.

    Returns the changes that were not applied. Raises `Unreadable` for more than `budget` (`MOST_BYTES`, `MOST_FILES`),
    and for what can't lie in the target, such as a file in a file's place.
    """
    budget = budget or CopyBudget(MOST_BYTES, MOST_FILES)
    left, dropped = LeftFiles(after), []
    for change in every:
        destination = target / change.path
        if not brings(change) or not _stays_inside(target, destination):
            dropped.append(change)
            continue
        try:
            if destination.is_symlink() or destination.is_file():
                destination.unlink()
            if change.kind is not ChangeKind.DELETED:
                destination.parent.mkdir(parents=True, exist_ok=True)
                if (after / change.path).is_symlink():
                    destination.symlink_to(left.link(change.path))
                else:
                    budget.copy(left, change.path, destination)
        except OSError as error:
            raise Unreadable(f"{change.path} can't be taken over: {error.strerror}") from error
    return dropped


FileState = tuple[int, int, int]
"""The inode, the time of its last change, which nobody can set, and the size of a file or link."""


def file_states(folder: Path) -> dict[str, FileState]:
    """The files and links below `folder`, but for folders that are not compared. It may change meanwhile.

    Raises `Unreadable` for more than `MOST_LISTED` entries.
    """
    left, found, waiting, looked_at = LeftFiles(folder), dict[str, FileState](), [""], 0
    while waiting:
        for path, status in left.entries(waiting.pop()):
            looked_at += 1
            if looked_at > MOST_LISTED:
                raise Unreadable(f"the working copy has more than {MOST_LISTED:,} files")
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                found[path[1:]] = (status.st_ino, status.st_ctime_ns, status.st_size)
            elif stat.S_ISDIR(status.st_mode) and path.rpartition("/")[2] not in UNSEEN and path.count("/") < DEEPEST:
                waiting.append(path)
    return found


def _stays_inside(root: Path, destination: Path) -> bool:
    """True if no link in the path leads `destination` out of `root`."""
    return destination.parent.resolve().is_relative_to(root.resolve())


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    first, second = one.stat(), other.stat()
    if (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino):  # of one overlay's base
        return True
    return first.st_mode == second.st_mode and filecmp.cmp(one, other, shallow=False)
