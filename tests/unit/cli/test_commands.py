"""The list of commands, and what a command costs before it begins."""

from __future__ import annotations

import subprocess
import sys

import pytest
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


@pytest.mark.parametrize("command", ["keys", "status", "train", "run", "sessions", "node"])
def test_a_command_does_not_wait_for_the_modules_of_others(command: str) -> None:
    code = "import sys; from rolltap.cli.main import app; app([sys.argv[1], '--help'], standalone_mode=False)"
    code += "; print(sorted({'sqlalchemy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
