"""A run's folder: it holds the checkpoints and the run's id, and one process at a time trains in it.

The server gives a policy to a run. So a trainer that was killed and starts again with its folder gets its policy back
without `take_over`, and a trainer with another folder does not.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rolltap.errors import TrainerError

ID_FILE = "run-id"
LOCK_FILE = "lock"
ATTEMPT_FILE = "attempt"


def run_id(folder: Path) -> str:
    """The id of the run with its checkpoints in `folder`. A new id is durable on disk before this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ID_FILE
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        pass
    making = _written(folder / f".making-{ID_FILE}-{os.getpid()}", uuid.uuid4().hex)
    with suppress(FileExistsError):
        os.link(making, path)  # if two processes begin at once, one wins
    making.unlink()
    return path.read_text(encoding="utf-8").strip()


def next_attempt(folder: Path, least: int) -> int:
    """The number of this start of the run in the locked `folder`: greater than all earlier ones, at least `least`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ATTEMPT_FILE
    number = max(least, int(path.read_text(encoding="utf-8")) + 1 if path.exists() else 0)
    _written(folder / f".making-{ATTEMPT_FILE}", str(number)).rename(path)
    return number


def _written(path: Path, text: str) -> Path:
    """A new file with a text that is durable on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks `folder` inside the block; `TrainerError` if another process trains in it. A killed process's lock ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainerError(f"another process trains in {folder}: stop it, or give another --out") from None
        yield
