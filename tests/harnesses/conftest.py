"""Installed releases: pinned, real, in `.cache/harnesses` (ignored by git), installed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from rolltap.errors import ConfigError
from rolltap.harnesses.agents.install import Installation, install
from rolltap.harnesses.agents.registry import HARNESSES
from rolltap.harnesses.base import Package

from ..conftest import CELL
from .matrix import Cell

CACHE = Path(__file__).parents[2] / ".cache" / "harnesses"


@pytest.fixture
def note_cell(record_property: Callable[[str, object], None]) -> Callable[[Cell], None]:
    """Puts a cell into the stage's report, with the outcome of this test."""
    return lambda cell: record_property(CELL, asdict(cell))


FAILURES: dict[Package, ConfigError] = {}
"""Why packages could not be installed: only the first test that needs one waits for its registry."""


def installed(package: Package) -> Installation:
    """`package` in the cache. A registry may lack a dependency for some minutes: the installation is tried again."""
    if package in FAILURES:
        raise FAILURES[package]
    attempts = Retrying(
        retry=retry_if_exception_type(ConfigError),
        stop=stop_after_delay(200),
        wait=wait_exponential(multiplier=5, max=60),
        reraise=True,
    )
    try:
        return attempts(install, package, CACHE)
    except ConfigError as error:
        FAILURES[package] = error
        raise


@pytest.fixture(scope="session")
def release() -> Callable[[str], Installation]:
    def of(name: str) -> Installation:
        package = HARNESSES[name].package
        assert package is not None
        return installed(package)

    return of
