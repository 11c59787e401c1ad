"""A distribution that somebody else installed: a module and a dist-info folder with entry points, on a path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def install_distribution(folder: Path, group: str, name: str, source: str) -> Path:
    """Makes `folder` a place to import from that holds a module of its own, whose `TOY` is registered as `name`."""
    module = f"toy_{group.rpartition('.')[2]}_{name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    about = folder / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:TOY\n", encoding="utf-8")
    return folder


def run_suite(suite: Path, outside: Path, select: str) -> str:
    """Runs the tests of `suite` that match `select` with `outside` to import from; returns what pytest printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(outside), str(ROOT / "src")])}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(suite), "-k", select]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout
