"""`rolltap view` opens what it is named, and says what it can't find."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.cli.view import metrics_files
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError
from rolltap.reading.runs import step_files
from rolltap.settings import Settings, store_url
from rolltap.types import Task

from .conftest import Viewed


def test_a_store_is_a_file_its_folder_or_a_url(tmp_path: Path):
    (tmp_path / "rolltap.db").touch()
    assert store_url(tmp_path) == store_url(str(tmp_path / "rolltap.db")) == f"sqlite:///{tmp_path}/rolltap.db"
    for url in ("postgresql://host/name", "sqlite:///there", "memory:"):
        assert store_url(url) == url


def test_a_folder_may_hold_the_folder_of_the_data(tmp_path: Path):
    (tmp_path / "rolltap-data").mkdir()
    (tmp_path / "rolltap-data" / "rolltap.db").touch()
    assert store_url(tmp_path) == f"sqlite:///{tmp_path}/rolltap-data/rolltap.db"


def test_a_store_that_is_not_there_is_said_with_what_was_looked_for(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        store_url(tmp_path)
    assert f"looked for {tmp_path}/rolltap.db and {tmp_path}/rolltap-data/rolltap.db" in caught.value.message
    with pytest.raises(ConfigError, match="nothing: no store there"):
        store_url(tmp_path / "nothing")
    assert store_url(tmp_path / "new.db", may_be_new=True) == f"sqlite:///{tmp_path}/new.db"


@pytest.mark.parametrize(
    "command",
    [
        ["export", "out"],
        ["log", "verify"],
        ["log", "stats"],
        ["log", "export", "keep.rtlog"],
        ["log", "backup", "copy.db"],
        ["log", "upgrade"],
        ["log", "prune", "--older-than", "1d", "--dry-run"],
        ["view", "--html", "page.html", "ID"],
    ],
)
def test_a_command_that_reads_a_store_names_one_that_is_not_there(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command, "--store", "nothing.db"])
    assert result.exit_code == 1
    assert "nothing.db: no store there" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_writes_makes_the_file_that_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}]
    Path("runs.jsonl").write_text(json.dumps({"messages": messages}))
    result = CliRunner().invoke(app, ["import", "runs.jsonl", "--store", "new.db"])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["log", "stats", "--store", "new.db"]).exit_code == 0
    assert (tmp_path / "new.db").is_file()


async def test_a_session_is_written_beside_the_server_and_never_over_a_file(viewed: Viewed, tmp_path: Path):
    talk = await viewed.reading.talk()
    await talk.two_turns()
    store = str(viewed.reading.home.app.settings.store_url)
    out = tmp_path / "session.html"
    command = ["view", "--html", str(out), talk.session_id, "--store", store, "--tokenizer", str(FOLDER)]
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.output
    assert out.stat().st_mode & 0o777 == 0o600
    assert "Which files hold a zebra?" in out.read_text(encoding="utf-8")
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 1
    assert "exists" in result.output


async def test_a_trainers_steps_are_drawn_from_the_file_that_is_named(viewed: Viewed, tmp_path: Path):
    await viewed.reading.home.client.open_group(Task("zebra", "Find it."), policy="tiny", n=1)
    store = str(viewed.reading.home.app.settings.store_url)
    steps = tmp_path / "metrics.jsonl"
    steps.write_text('{"step": 1, "version": 1, "loss": 0.125, "grad_norm": 2}\n')
    out = tmp_path / "run.html"
    command = ["view", "--html", str(out), "tiny", "--store", store]
    result = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--metrics", "tiny=nowhere.jsonl"])
    assert result.exit_code == 1
    assert "no file nowhere.jsonl" in result.output
    result = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--metrics", f"tiny={steps}"])
    assert result.exit_code == 0, result.output
    page = out.read_text(encoding="utf-8")
    assert '"loss":[0.125]' in page
    assert "Gradient norm, of a step" in page


def test_the_settings_name_a_policys_steps(tmp_path: Path):
    engine = {"kind": "vllm", "url": "http://127.0.0.1:1"}
    policies = {"a": {"engine": "main", "metrics": "~/train/metrics.jsonl"}, "b": {"engine": "main"}}
    settings = Settings.model_validate({"data": tmp_path, "engines": {"main": engine}, "policies": policies})
    assert step_files(settings) == {"a": Path.home() / "train" / "metrics.jsonl"}
    named = tmp_path / "steps.jsonl"
    named.touch()
    assert metrics_files([f"b={named}"], settings) == {"b": named}
    assert metrics_files([str(named)], settings) == {"": named}, "of every policy"
