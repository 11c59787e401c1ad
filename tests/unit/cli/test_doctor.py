"""`rolltap doctor` as a person sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltap.cli.doctor import check
from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def config(folder: Path, text: str) -> Path:
    path = folder / "rolltap.toml"
    path.write_text(f'data = "{folder / "data"}"\n{text}')
    return path


async def test_a_password_is_never_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = '[store]\nurl = "postgresql://postgres:s3cret-pw@127.0.0.1:1/nowhere"\n'
    assert not await check(config(tmp_path, store))
    output = capsys.readouterr().out
    assert "postgres:***@127.0.0.1" in output
    assert "s3cret-pw" not in output


async def test_a_model_that_the_engine_does_not_serve_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ScriptedEngine(say("Hello."), FOLDER) as engine:
        policy = f'[policies.my-model]\nengine = "main"\ntokenizer = "{FOLDER}"\n'
        path = config(tmp_path, f'[engines.main]\nurl = "{engine.url}"\n{policy}')
        assert not await check(path)
        output = capsys.readouterr().out
        assert "engine main serves no model 'my-model'" in output
        assert "set the policy's `model` to one of scripted" in output
        path.write_text(path.read_text() + 'model = "scripted"\n')
        assert await check(path), capsys.readouterr().out


async def test_an_engine_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not await check(config(tmp_path, '[engines.main]\nurl = "http://127.0.0.1:1"\n'))
    assert "engine main" in (output := capsys.readouterr().out)
    assert "can't be reached" in output
