"""The list of commands, and what a command costs before it begins."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from rolltap.cli.main import ELSEWHERE, app


def test_the_help_lists_every_command_under_its_panel() -> None:
    lines = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output.splitlines()
    panel, panel_of = "", dict[str, str]()
    for line in lines:
        if line.startswith("╭"):
            panel = line.strip("╭╮─ ")
        elif line.startswith("│ ") and not line.startswith("│  "):
            panel_of[line.split()[1]] = panel
    assert {name: panel_of.get(name) for name in ELSEWHERE} == {name: place[0] for name, place in ELSEWHERE.items()}


def test_a_command_does_not_wait_for_the_modules_of_others() -> None:
    """One process takes one command after another: whose line is not empty first has imported what the line names."""
    commands = ["keys", "status", "train", "run", "sessions", "node"]
    code = """
import sys
from rolltap.cli.main import app

for command in sys.argv[1:]:
    app([command, "--help"], standalone_mode=False)
    print("imported", command, *sorted({"sqlalchemy", "torch"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    imported = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert imported == [f"imported {command}" for command in commands]
