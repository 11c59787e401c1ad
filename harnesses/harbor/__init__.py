"""Harbor over rolltap: its tasks without Docker, its agents with a session of ours, groups of its trials for trainers.

Importing a module of this folder, `dockerfile` excepted, imports Harbor: call `check_installed` first.
"""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from rolltap.errors import ConfigError
from rolltap.extras import install_line

PYTHON = (3, 12)
TESTED = ("0.24.0",)


class UntestedHarbor(UserWarning):
    """The installed version of Harbor is not one that this folder was tested with."""


def check_installed() -> None:
    """`ConfigError` says which Python or package is missing; `UntestedHarbor` is warned of for another version."""
    if sys.version_info[:2] < PYTHON:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"Harbor needs Python 3.12 or later, this is {here} ({sys.executable}): make an environment of its own, "
            f"python3.12 -m venv harbor-env, and install there: {install_line('harbor')}"
        )
    try:
        installed = version("harbor")
    except PackageNotFoundError:
        raise ConfigError(f"Harbor is not installed: {install_line('harbor')}") from None
    if installed not in TESTED:
        tested = ", ".join(TESTED)
        warnings.warn(f"harbor {installed} was not tested with rolltap; tested: {tested}", UntestedHarbor, stacklevel=2)
