"""Finds rolltap's own files in a folder that an agent works in or gets a copy of. They hold keys and other sessions.

A data folder is called `rolltap-data`, or has the planes' keys in `keys.toml`. A settings file of any name may
have keys of planes, engines and vendors. A store may lie outside the data folder, with its lock beside it.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path

from rolltap.errors import RuntimeFailed
from rolltap.settings import DATA

SKIPPED = {".git", "node_modules", "__pycache__"}
KEYS = re.compile(rb"^(admin|trainer|secret)\s*=", re.M)
SETTINGS = re.compile(rb"^\[(keys|engines\.|policies\.)", re.M)
STORE = b"SQLite format 3\0"
BESIDE_STORE = ("", "-wal", "-shm", ".index", ".lock")


PERSONAL = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".git-credentials", ".pgpass", ".pypirc"),
    *(".password-store", ".mozilla", ".bash_history", ".zsh_history", ".python_history", "keys.toml"),
)
"""Names in a folder that hold a person's keys, or show that it is somebody's HOME."""


def check_shown(path: Path) -> None:
    """Raises `RuntimeFailed` if a sandbox can't show the file or folder `path`: HOME, a folder around it, or keys."""
    real = path.resolve()
    if real.is_file():
        return
    homes = {Path.home().resolve(), Path(pwd.getpwuid(os.getuid()).pw_dir).resolve()}
    around = next((home for home in homes if home.is_relative_to(real)), None)
    if around is not None:
        raise RuntimeFailed(
            f"a sandbox can't show {path}: {around} is in it; install what needs it in a folder of its own"
        )
    if private := next((name for name in PERSONAL if os.path.lexists(real / name)), None):
        raise RuntimeFailed(f"a sandbox can't show {path}: it holds {private}; install what needs it elsewhere")


def private_paths(folder: Path) -> list[Path]:
    """The private files and data folders in `folder`, relative to it. Links are not followed.

    Raises `RuntimeFailed` if `folder` is itself a data folder.
    """
    paths = [path.relative_to(folder) for path in _private(folder)]
    if Path() in paths:
        raise RuntimeFailed(f"{folder} is rolltap's data folder: run the agent elsewhere, as it would see all keys")
    return paths


def _private(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        parent = Path(here)
        if parent.name == DATA or ("keys.toml" in files and KEYS.search(_beginning(parent / "keys.toml"))):
            folders.clear()
            yield parent
            continue
        folders[:] = [name for name in folders if name not in SKIPPED]
        for name in files:
            if name == "rolltap.toml" or (name.endswith(".toml") and SETTINGS.search(_beginning(parent / name))):
                yield parent / name
            store = parent / name.removesuffix(".lock")
            if name.endswith(".lock") and _beginning(store).startswith(STORE):
                beside = (store.with_name(store.name + suffix) for suffix in BESIDE_STORE)
                yield from (path for path in beside if path.is_file())


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(65_536)
    except OSError:
        return b""
