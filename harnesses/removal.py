"""Removes what an agent left, whatever it is: deep trees, folders without rights, odd kinds of files."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

log = logging.getLogger("rolltap.runner")


def remove(path: Path) -> None:
    """Removes a file or a folder with all that is in it; links are removed, not followed. Never raises: a removal
    that fails is the agent's doing, and logged.

    Python's own removal goes one call deeper with each folder, which an agent can nest as it likes.
    """
    if not os.path.lexists(path):
        return
    for command in (("rm", "-rf"), ("chmod", "-R", "u+rwX"), ("rm", "-rf")):
        subprocess.run([*command, "--", str(path)], capture_output=True, check=False)
        if not os.path.lexists(path):
            return
    log.error("%s can't be removed: remove it by hand", path)
