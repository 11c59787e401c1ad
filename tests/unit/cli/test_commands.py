"""The list of commands, and what a command costs before it begins."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import ELSEWHERE, app


def test_the_help_lists_every_command_under_its_panel() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    begins = {line.split()[1]: number for number, line in enumerate(shown.splitlines()) if line.startswith("│ ")}
    panels = {line.strip("╭╮─ "): number for number, line in enumerate(shown.splitlines()) if line.startswith("╭")}
    for name, (panel, _, _) in ELSEWHERE.items():
        below = max(number for number in panels.values() if number < begins[name])
        assert panels[panel] == below, name


@pytest.mark.parametrize("command", ["keys", "status", "train"])
def test_a_command_does_not_wait_for_the_modules_of_others(command: str) -> None:
    code = "import sys; from rolltap.cli.main import app; app([sys.argv[1], '--help'], standalone_mode=False)"
    code += "; print(sorted({'sqlalchemy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
