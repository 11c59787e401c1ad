"""No change of one line of a recipe, an estimator or a loss survives the tests that compute them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = [
    *("estimators", "epo", "archer", "seeupo", "spear", "spiral"),
    *("mars", "gigpo", "cm2", "slea_rl", "hiper", "rise"),
]
"""What was tried whole; `python -m tests.unit.trainer_client.recipes_mutants` tries the others, too."""

PARTS = 6
"""One of so many parts of the changes is made a day: all of them within a week."""


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_no_change_of_one_line_survives() -> None:
    """Some hundred CPU seconds: some sixty changes, each with the recipes' tests in a process of its own."""
    part = int(time.time() / 86_400) % PARTS
    command = [
        sys.executable,
        "-m",
        f"{__package__}.recipes_mutants",
        "--every",
        str(PARTS),
        "--first",
        str(part),
        *NAMES,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
