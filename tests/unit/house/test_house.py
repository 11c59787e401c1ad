"""The house rules that a program can hold: lint, types, import contracts, sizes, documented settings."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
CODE = ("src/rolltap", "proxy", "reconstructor", "trainer_client", "harnesses")
MAX_LINES = 450


def run(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def sources() -> list[Path]:
    """Every Python file of the product, once (the links in src/rolltap lead to the folders at the top)."""
    found: list[Path] = []
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            linked = any(parent.is_symlink() for parent in path.parents if parent != ROOT)
            if not linked:
                found.append(path)
    return found


def test_ruff_finds_nothing() -> None:
    run(str(BIN / "ruff"), "check", ".")


def test_everything_is_formatted() -> None:
    run(str(BIN / "ruff"), "format", "--check", ".")


@pytest.mark.timeout(300)
def test_types_hold() -> None:
    run(str(BIN / "pyright"))


def test_folders_import_only_what_they_may() -> None:
    run(str(BIN / "lint-imports"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_small_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, f"{path} wants a second room"
    if text.strip() and path.name != "__init__.py":
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring that states its contract"
