"""Installed releases: pinned, real, in `.cache/harnesses` (ignored by git), installed when they are first asked for."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_exponential

from rolltap.errors import ConfigError
from rolltap.harnesses.base import Package
from rolltap.harnesses.install import Installation, install
from rolltap.harnesses.registry import HARNESSES

from ..conftest import CELL
from .matrix import Cell

CACHE = Path(__file__).parents[2] / ".cache" / "harnesses"


@pytest.fixture
def note_cell(record_property: Callable[[str, object], None]) -> Callable[[Cell], None]:
    """Puts a cell into the stage's report, with the outcome of this test."""
    return lambda cell: record_property(CELL, asdict(cell))


@retry(
    retry=retry_if_exception_type(ConfigError),
    stop=stop_after_delay(150),
    wait=wait_exponential(multiplier=5, max=60),
    reraise=True,
)
def installed(package: Package) -> Installation:
    """`package` in the cache; of several processes one installs it and the others wait.

    A registry may lack one dependency for some minutes, which npm doesn't wait for: the installation is tried again.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return install(package, CACHE)


@pytest.fixture(scope="session")
def release() -> Callable[[str], Installation]:
    def of(name: str) -> Installation:
        package = HARNESSES[name].package
        assert package is not None
        return installed(package)

    return of
