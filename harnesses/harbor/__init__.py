"""Runs Harbor with rolltap: its tasks without Docker, its agents in recorded sessions, its trials as groups.

Every module here except `dockerfile` and `names` imports Harbor: call `check_installed` before you import one.
"""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from rolltap.errors import ConfigError
from rolltap.extras import install_line, requirement

PYTHON = (3, 12)
"""The lowest Python version that Harbor supports."""

TESTED = ("0.24.0", "0.25.0")
"""The versions of Harbor that this folder was tested with."""


class UntestedHarbor(UserWarning):
    """The installed version of Harbor is not in `TESTED`."""


def check_installed() -> None:
    """Checks the Python version and the installed Harbor.

    Raises `ConfigError` if Python is too old or Harbor is missing; the message says what to install. Warns with
    `UntestedHarbor` if the version of Harbor is not in `TESTED`.
    """
    if sys.version_info[:2] < PYTHON:
        current = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"Harbor needs Python 3.12 or later, this is {current} ({sys.executable}): make an environment of its own, "
            f"python3.12 -m venv harbor-env, and there: pip install {requirement('harbor')}"
        )
    try:
        installed = version("harbor")
    except PackageNotFoundError:
        raise ConfigError(f"Harbor is not installed: {install_line('harbor')}") from None
    if installed not in TESTED:
        tested = ", ".join(TESTED)
        warnings.warn(f"harbor {installed} was not tested with rolltap; tested: {tested}", UntestedHarbor, stacklevel=2)
