"""What an interpreter runs and imports from: the folders that a sandbox shows of it."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.private_files import check_shown, private_paths

PRINT_FOLDERS = """\
import json, os, sys
print(json.dumps([*sys.path[1:], sys.executable, os.path.realpath(sys.executable), sys.prefix, sys.base_prefix]))
"""
"""Prints, as JSON, the programs of an interpreter and the folders that it imports from."""

PREFIX = "lib/python3*/os.py"
"""In an interpreter's own folder."""


@cache
def python_folders(python: str) -> tuple[Path, ...]:
    """The programs and folders outside `/usr` that an interpreter runs and imports from, as in a sandbox.

    Raises `RuntimeFailed` if it can't run, or if one of them holds what a sandbox must not show.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, "-s", "-c", PRINT_FOLDERS]
    try:
        listing = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeFailed(f"can't run the Python {python}: {error}") from error
    folders = {Path(path) for path in json.loads(listing) if Path(path).exists()}
    outside = {folder for folder in folders if not folder.is_relative_to("/usr")}
    nested = {folder for folder in outside if any(folder.is_relative_to(other) for other in outside - {folder})}
    for folder in outside - nested:
        check_shown(folder)
        if not any(
            (around / "pyvenv.cfg").is_file() or list(around.glob(PREFIX)) for around in (folder, *folder.parents)
        ):
            check_without_keys(folder)
    return tuple(sorted(outside - nested))


def check_without_keys(folder: Path) -> None:
    """Raises `RuntimeFailed` for a folder with rolltap's files: a project that is installed in place, for example."""
    if private := private_paths(folder):
        raise RuntimeFailed(f"a sandbox can't show {folder}, which holds {private[0]}: install it, not in place")
