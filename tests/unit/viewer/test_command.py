"""`rolltap view` opens what it is named, and says what it can't find."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.cli.view import store_of
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError

from .conftest import Viewed


def test_a_store_is_a_file_its_folder_or_a_url(tmp_path: Path):
    (tmp_path / "rolltap.db").touch()
    assert store_of(str(tmp_path)) == store_of(str(tmp_path / "rolltap.db")) == f"sqlite:///{tmp_path}/rolltap.db"
    assert store_of("postgresql://host/name") == "postgresql://host/name"
    with pytest.raises(ConfigError, match="no such store"):
        store_of(str(tmp_path / "nothing"))


async def test_a_session_is_written_beside_the_server_and_never_over_a_file(viewed: Viewed, tmp_path: Path):
    talk = await viewed.reading.talk()
    await talk.two_turns()
    store = str(viewed.reading.home.app.settings.store_url)
    out = tmp_path / "session.html"
    command = ["view", "--html", str(out), talk.session_id, "--store", store, "--tokenizer", str(FOLDER)]
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.output
    assert "Which files hold a zebra?" in out.read_text(encoding="utf-8")
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 1
    assert "exists" in result.output
