"""The house rules that a program can hold: lint, format, types, import contracts, docstrings."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from .product import ROOT, Source, sources

BIN = Path(sys.executable).parent


def run(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_ruff_finds_nothing() -> None:
    run(str(BIN / "ruff"), "check", ".")


def test_everything_is_formatted() -> None:
    run(str(BIN / "ruff"), "format", "--check", ".")


def test_folders_import_only_what_they_may() -> None:
    run(str(BIN / "lint-imports"))


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_a_file_says_what_it_is(source: Source) -> None:
    if source.text.strip() and not source.name.endswith("__init__.py"):
        assert ast.get_docstring(source.tree), f"{source.name} has no docstring that states its contract"
