"""Installed releases: pinned, real, in `.cache/harnesses` (ignored by git), installed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rolltap.harnesses.install import Installation, install
from rolltap.harnesses.registry import HARNESSES

from .matrix import Cell, table, write_report

CACHE = Path(__file__).parents[2] / ".cache" / "harnesses"


MATRIX: list[Cell] = []


@pytest.fixture(scope="session")
def cells() -> list[Cell]:
    """The matrix; printed and written at the end."""
    return MATRIX


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MATRIX:
        write_report(MATRIX)
        terminalreporter.write_line(table(MATRIX))


@pytest.fixture(scope="session")
def release() -> Callable[[str], Installation]:
    def installed(name: str) -> Installation:
        package = HARNESSES[name].package
        assert package is not None
        return install(package, CACHE)

    return installed
