"""W&B and MLflow, in the modes that need no server: a trainer that starts again goes on with its run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ..conftest import ROOT

PYTHON = ROOT / ".cache" / "trainers" / "sinks-1" / "bin" / "python"
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}


def train_two_steps(out: Path, sink: str, first: int) -> None:
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    environment["MLFLOW_TRACKING_URI"] = (out.parent / "mlflow").as_uri()
    command = [str(PYTHON), "-m", "tests.trainers.sink_part", str(out), sink, str(first)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.trainers
def test_both_parts_are_one_run_of_wandb(tmp_path: Path) -> None:
    """What is kept offline is synchronised under the id in its folder's name."""
    for first in (1, 3):
        train_two_steps(tmp_path / "out", "wandb", first)
    parts = [path.name.rpartition("-")[2] for path in (tmp_path / "out" / "wandb").glob("offline-run-*")]
    assert parts == [(tmp_path / "out" / "run-id").read_text()] * 2
    train_two_steps(tmp_path / "other", "wandb", 1)
    (other,) = (tmp_path / "other" / "wandb").glob("offline-run-*")
    assert not other.name.endswith(parts[0])


@pytest.mark.trainers
def test_both_parts_are_one_run_of_mlflow(tmp_path: Path) -> None:
    for first in (1, 3):
        train_two_steps(tmp_path / "out", "mlflow", first)
    (values,) = (tmp_path / "mlflow").glob("*/*/metrics/reward")
    assert [line.split()[1:] for line in values.read_text().splitlines()] == [
        [f"{step}.0", str(step)] for step in (1, 2, 3, 4)
    ]
    train_two_steps(tmp_path / "other", "mlflow", 1)
    assert len(list((tmp_path / "mlflow").glob("*/*/metrics/reward"))) == 2
