"""Removes from a working copy what would lead an evaluator's program elsewhere, or block it.

A link to what only that program sees (hidden answers, its own input, its HOME) would be read as the agent's answer. A
pipe in place of a file would take all its time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from rolltap.errors import Unreadable
from rolltap.harnesses.logs.files import LeftFiles

SYSTEM = tuple(map(PurePosixPath, ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt")))
"""What a link of the working copy may lead to besides the working copy: every sandbox shows it alike."""
MOST_ENTRIES = 2_000_000
DEEPEST = 500
NAMED = 100


def remove_traps(left: LeftFiles, workdir: os.PathLike[str], system: Sequence[PurePosixPath] = SYSTEM) -> list[str]:
    """Removes links that lead neither into the working copy, seen at `workdir`, nor into the `system`, and pipes,
    sockets and devices.

    Returns what was removed, by path, `NAMED` at most. The working copy may change meanwhile: nothing is reached by a
    link. Raises `Unreadable` if it has more entries than may be looked at.
    """
    removed, count, looked_at, waiting = [], 0, 0, [""]
    while waiting:
        folder = waiting.pop()
        for path, status in left.entries(folder):
            looked_at += 1
            if looked_at > MOST_ENTRIES:
                raise Unreadable(f"the working copy has more than {MOST_ENTRIES:,} files")
            if stat.S_ISDIR(status.st_mode):
                if path.count("/") < DEEPEST:
                    waiting.append(path)
            elif not stat.S_ISREG(status.st_mode):
                with suppress(OSError):  # what is gone meanwhile leads nowhere
                    target = left.link(path) if stat.S_ISLNK(status.st_mode) else ""
                    if not target or not _stays(target, path, (PurePosixPath(workdir), *system)):
                        left.unlink(path)
                        count += 1
                        if count <= NAMED:
                            removed.append(f"{path[1:]} -> {target}" if target else path[1:])
    return sorted(removed) + [f"and {count - NAMED:,} more"] * (count > NAMED)


def _stays(target: str, path: str, folders: Sequence[PurePosixPath]) -> bool:
    """Whether the link `path` leads into the working copy or these folders, wherever other links of theirs lead.

    After a name, `..` leaves the folder that the name leads to, which may be anywhere.
    """
    parts = PurePosixPath(target).parts
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    if ".." in parts[ups:]:
        return False
    if not target.startswith("/"):
        return ups <= path.count("/") - 1
    return any(PurePosixPath(target).is_relative_to(folder) for folder in folders)
