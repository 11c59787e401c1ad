"""`rolltap train`: what is said on the command line is what the trainer gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.trainer_client.run import loop
from rolltap.trainer_client.settings import TrainerSettings


def test_zero_is_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rolltap.toml").write_text("[trainer]\nseed = 7\nmax_staleness = 3\n")
    ran: list[TrainerSettings] = []
    monkeypatch.setattr(loop, "run", ran.append)
    given = ["--policy", "p", "--model", "m", "--out", "run", "--key", "k", "--seed", "0", "--max-staleness", "0"]
    result = CliRunner().invoke(app, ["train", *given])
    assert result.exit_code == 0, result.output
    assert [(settings.seed, settings.max_staleness) for settings in ran] == [(0, 0)]


@pytest.mark.parametrize(
    ("more", "url"), [("", "http://127.0.0.1:9001"), ('[trainer]\nurl = "http://there:1"\n', "http://there:1")]
)
def test_the_server_is_that_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rolltap.toml").write_text('data = "elsewhere"\n[listen]\ntrainer_port = 9001\n' + more)
    Path("elsewhere").mkdir()
    Path("elsewhere/keys.toml").write_text('trainer = "kept"\n')
    ran: list[TrainerSettings] = []
    monkeypatch.setattr(loop, "run", ran.append)
    result = CliRunner().invoke(app, ["train", "--policy", "p", "--model", "m", "--out", "run"])
    assert result.exit_code == 0, result.output
    assert [(settings.url, settings.key) for settings in ran] == [(url, "kept")]


def test_a_mistyped_url_is_said_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "FIRST_CONTACT_S", 0.3)
    Path("m").mkdir()
    Path("m/config.json").write_text("{}")
    given = ["--policy", "p", "--model", "m", "--out", "run", "--key", "k", "--url", "http://127.0.0.1:9"]
    result = CliRunner().invoke(app, ["train", *given])
    assert result.exit_code == 1
    assert "no rolltap server at http://127.0.0.1:9 (" in result.output
    assert not Path("run").exists()


def test_a_model_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--policy", "p", "--model", "nothere", "--out", "run", "--key", "k", "--url", "http://127.0.0.1:1"]
    result = CliRunner().invoke(app, ["train", *given])
    assert result.exit_code == 1
    assert "--model nothere is not a model's folder" in result.output
    assert "hf download" not in result.output
    given[3] = "Qwen/Qwen3-8B"
    assert "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B" in CliRunner().invoke(app, ["train", *given]).output
