"""Trainers in environments of their own: what theirs makes of our rows."""

from __future__ import annotations

import os
import subprocess

import pytest

from ..conftest import ROOT

PYTHON = ROOT / ".cache" / "trainers" / "tinker-cookbook-0.5.8" / "bin" / "python"


@pytest.mark.trainers
def test_tinker_cookbook_assembles_the_same_data() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [str(PYTHON), "-m", "tests.trainers.cookbook"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "24 rows are the same"
