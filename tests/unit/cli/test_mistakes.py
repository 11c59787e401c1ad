"""What a newcomer gets wrong ends in one line that says what to change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.settings import load_settings


def said(*arguments: str) -> str:
    """What a command that fails prints; it must be one line."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.output.strip().count("\n") == 0
    return result.output


def test_the_doctor_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rolltap.cli.doctor.EXTRAS", {"tokens": ("no_such_module",)})
    assert "pip install 'rolltap[tokens]'" in CliRunner().invoke(app, ["doctor"]).output


def test_training_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "rolltap.trainer_client.main", None)
    output = said("train", "--policy", "p", "--model", "m", "--out", "run", "--key", "k")
    assert "pip install 'rolltap[train]'" in output


def test_one_file_holds_the_settings_of_the_server_and_of_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "rolltap.toml"
    path.write_text('data = "here"\n[trainer]\ngroups = 4\n')
    assert load_settings(path).data == Path("here")


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rolltap.toml"
    path.write_text("[listen]\nagent_prot = 1\n")
    assert "listen.agent_prot: no such key" in said("serve", "--config", str(path))


def test_a_tag_without_a_value_is_refused() -> None:
    assert "--tag: want NAME=VALUE, not 'nightly'" in said("sessions", "open", "--tag", "nightly")


def test_a_missing_file_to_import_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "missing.jsonl"
    assert said("import", str(path)).count("missing.jsonl") == 1


def test_the_demo_without_its_extra_names_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rolltap.cli.doctor.EXTRAS", {"tokens": (), "train": (), "demo": ("nothing",), "export": ()})
    assert "pip install 'rolltap[demo]'" in said("demo")
    assert not (tmp_path / "demo-out").exists()


def test_a_task_file_that_is_not_there_is_no_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "missing.jsonl: no such file" in said("run", "missing.jsonl")
