"""Ruff finds nothing, and every file states its contract. Format, types and import contracts are `make types`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from .product import ROOT, sources


def test_ruff_finds_nothing() -> None:
    ruff = Path(sys.executable).parent / "ruff"
    result = subprocess.run([ruff, "check", "."], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_every_file_says_what_it_is() -> None:
    written = (source for source in sources() if source.text.strip() and not source.name.endswith("__init__.py"))
    silent = [source.name for source in written if not ast.get_docstring(source.tree)]
    assert silent == [], "these have no docstring that states their contract"


def test_no_end_waits_for_the_connections_of_a_server() -> None:
    """`Server.serve_forever` and `wait_closed` do, from Python 3.12 on: a silent one would hold it up."""
    waits = [
        f"{source.name}:{node.lineno}"
        for source in sources()
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in ("serve_forever", "wait_closed")
    ]
    assert waits == []
