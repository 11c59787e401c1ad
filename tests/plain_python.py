"""An interpreter with pytest alone, for evaluators that run it: a start takes 0.3 instead of 4 CPU seconds.

Our own environment has the plug-ins of every dependency, which each pytest imports.
"""

from __future__ import annotations

import compileall
import fcntl
import os
import platform
import shutil
import tempfile
import venv
from collections.abc import Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".cache"
DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


@cache
def plain_python(*plugins: str) -> str:
    """Its path. `plugins` are distributions that it has, too. All runs share it: it is made once for each set of
    versions."""
    names = (*DISTRIBUTIONS, *plugins)
    versions = [f"{name}{distribution(name).version}" for name in names]
    every = CACHE.resolve() / "plain-python"
    place = every / "-".join([f"python{platform.python_version()}", *versions])
    every.mkdir(parents=True, exist_ok=True)
    with open(every / "lock", "w", encoding="ascii") as lock, tempfile.TemporaryDirectory(dir=every) as made:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "bin" / "python").exists():  # or a link to an interpreter that has gone
            shutil.rmtree(place, ignore_errors=True)
            _make(Path(made, "venv"), names)
            os.rename(Path(made, "venv"), place)
    return str(place / "bin" / "python")


def _make(place: Path, names: Sequence[str]) -> None:
    venv.create(place, symlinks=True)
    site = next(place.glob("lib/python3*/site-packages"))
    for name in names:
        for file in distribution(name).files or ():
            source = Path(str(file.locate()))
            if source.suffix == ".py" or source.parent.name.endswith(".dist-info"):
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, site / file)
    compileall.compile_dir(site, quiet=1)
