"""`rolltap train`: what is said on the command line is what the trainer gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.trainer_client import main
from rolltap.trainer_client.settings import TrainerSettings


def test_zero_is_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rolltap.toml").write_text("[trainer]\nseed = 7\nmax_staleness = 3\n")
    ran: list[TrainerSettings] = []
    monkeypatch.setattr(main, "run", ran.append)
    given = ["--policy", "p", "--model", "m", "--out", "run", "--key", "k", "--seed", "0", "--max-staleness", "0"]
    result = CliRunner().invoke(app, ["train", *given])
    assert result.exit_code == 0, result.output
    assert [(settings.seed, settings.max_staleness) for settings in ran] == [(0, 0)]
