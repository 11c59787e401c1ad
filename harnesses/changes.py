"""Finds an agent's changes in its working copy by comparing two folders file by file.

It does not run git, as a repository's configuration can name programs that git would start. Links are compared as links
and never followed. Files are compared by what is in them: size and time are the agent's to set.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path

from rolltap.harnesses.copying import CopyBudget
from rolltap.harnesses.logs.files import LeftFiles

_CONFIGURATION = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "pyvenv.cfg"),
)

TEST_FILES = (
    *("test/*", "tests/*", "*/test/*", "*/tests/*", "test_*.py", "*/test_*.py", "*_test.py"),
    *(f"{place}{name}" for place in ("", "*/") for name in _CONFIGURATION),
    *("*.dist-info/*", "*.egg-info/*", "*.pth"),
)
"""Files that an evaluator takes from the source, never from the agent: tests, and what pytest and Python read as their
configuration, wherever it lies."""

MOST_BYTES = 4 << 30
MOST_FILES = 200_000
"""The most data and files of an agent that are copied into a clean workspace."""

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
    old, new = set(_files(before)), set(_files(after))
    differing = [Change(path, ChangeKind.ADDED) for path in new - old]
    differing += [Change(path, ChangeKind.DELETED) for path in old - new]
    differing += [Change(path, ChangeKind.MODIFIED) for path in old & new if not _same(before / path, after / path)]
    return sorted(differing, key=lambda change: change.path)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def apply_changes(
    every: list[Change], after: Path, target: Path, protected: tuple[str, ...] = (), takes: tuple[str, ...] = ("*",)
) -> list[Change]:
    """Applies the changes that `takes` matches to `target`, but not to protected files and not through links outward.

    Returns the changes that were not applied. Raises `Unreadable` for more than `MOST_BYTES` or `MOST_FILES`.
    """
    budget = CopyBudget(MOST_BYTES, MOST_FILES)
    dropped = []
    for change in every:
        destination = target / change.path
        is_taken = matches(change.path, takes) and not matches(change.path, protected)
        if not is_taken or not _stays_inside(target, destination):
            dropped.append(change)
            continue
        if destination.is_symlink() or destination.is_file():
            destination.unlink()
        if change.kind is not ChangeKind.DELETED:
            destination.parent.mkdir(parents=True, exist_ok=True)
            if (after / change.path).is_symlink():
                destination.symlink_to((after / change.path).readlink())
            else:
                budget.copy(LeftFiles(after), change.path, destination)
    return dropped


def _stays_inside(root: Path, destination: Path) -> bool:
    """True if no link in the path leads `destination` out of `root`."""
    return destination.parent.resolve().is_relative_to(root.resolve())


def _files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in UNSEEN and name not in links]
        for name in [*names, *links]:
            path = os.path.join(folder, name)
            if os.path.islink(path) or os.path.isfile(path):
                yield os.path.relpath(path, root)


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    first, second = one.stat(), other.stat()
    if (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino):  # of one overlay's base
        return True
    return first.st_mode == second.st_mode and filecmp.cmp(one, other, shallow=False)
