"""Working copies without copying: an overlay over a base that many rollouts share.

The base is never changed; an agent's changes are in its workspace's `upper`. Mounting needs root, or a user namespace
of one's own (`unshare -Urm rolltap node`); without it, working copies are plain copies.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rolltap.errors import RuntimeFailed


@functools.cache
def overlay_works(folder: Path) -> bool:
    """True if overlays can be mounted below `folder`. Mounts one to find out."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        return False
    trial = Path(tempfile.mkdtemp(prefix="rollout-overlay-", dir=folder))
    try:
        (trial / "base").mkdir()
        (trial / "work").mkdir()
        mount(trial / "base", trial)
        unmount(trial)
        return True
    except RuntimeFailed:
        return False
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def mount(base: Path, root: Path) -> None:
    """Mounts `base` at `root/work`, writable; changes go to `root/upper`. Raises `RuntimeFailed` if it can't."""
    upper, scratch = root / "upper", root / "overlay"
    for path in (upper, scratch):
        path.mkdir(mode=0o700)
    if any(mark in str(path) for path in (base, root) for mark in ",:\\"):
        raise RuntimeFailed(f"an overlay can't have a comma, colon or backslash in its path: {base}, {root}")
    options = f"lowerdir={base},upperdir={upper},workdir={scratch},userxattr"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(root / "work")]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        raise RuntimeFailed(f"can't mount an overlay of {base}: {result.stderr.strip()}")


def unmount(root: Path) -> None:
    """Undoes `mount`, even if files are still open there. Does nothing without a mount."""
    if os.path.ismount(root / "work"):
        subprocess.run(["umount", "--lazy", str(root / "work")], capture_output=True, check=False)
