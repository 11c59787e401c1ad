"""`rolltap doctor` as a person sees it."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from rolltap.calllog.sql import open_call_log
from rolltap.cli.doctor import EXTRAS, check, check_engine
from rolltap.cli.main import app
from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.agents.registry import get_harness, harness_names
from rolltap.settings import load_settings

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def config(folder: Path, text: str) -> Path:
    path = folder / "rolltap.toml"
    path.write_text(f'data = "{folder / "data"}"\n{text}')
    return path


async def test_it_says_which_limits_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert await check(None)
    line = next(line for line in capsys.readouterr().out.splitlines() if "limits of runs" in line)
    assert "files: rlimits" in line


async def test_extras_that_are_missing_have_one_line_of_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltap.cli.doctor.EXTRAS", {"tokens": ["no_module_1"], "export": ["no_module_2"], "otel": []})
    assert await check(None)
    lines = [line for line in capsys.readouterr().out.splitlines() if "pip install" in line]
    assert len(lines) == 1
    assert lines[0].startswith("extras: ")
    assert "[tokens]" in lines[0]


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
        assert "set the policy's `model` (--model) to one of scripted" in output
        path.write_text(path.read_text() + 'model = "scripted"\n')
        assert await check(path), capsys.readouterr().out


async def test_an_engine_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not await check(config(tmp_path, '[engines.main]\nurl = "http://127.0.0.1:1"\n'))
    assert "engine main" in (output := capsys.readouterr().out)
    assert "can't be reached" in output
    assert "start the model server, or correct engines.main.url (--engine)" in output


async def test_an_engine_that_answers_without_token_ids_is_not_said_to_be_down(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def completions(_: web.Request) -> web.Response:
        choice = {"index": 0, "text": "Hi", "finish_reason": "length"}
        events = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")

    server = web.Application()
    server.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    async with TestServer(server) as engine:
        assert not await check_engine(str(engine.make_url("/")), "vllm")
    output = capsys.readouterr().out
    assert "set engines.*.kind (--kind) to openai_compatible" in output
    assert "start the model server" not in output


async def test_the_store_of_a_running_server_is_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = config(tmp_path, "")
    call_log = open_call_log(load_settings(path).store_url)
    await call_log.start()
    try:
        assert await check(path)
    finally:
        await call_log.close()
    assert f"in use by the running server (process {os.getpid()})" in capsys.readouterr().out


def test_it_knows_every_extra() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys() - {"docs", "test"}


async def test_a_model_server_is_tried_before_there_are_settings(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedEngine(say("Hello."), FOLDER) as engine:
        assert await check_engine(engine.url, "vllm")
        output = capsys.readouterr().out
        assert "log-probs processed" in output
        assert "a weight version for every token" in output
        assert await check_engine(engine.url, "rolltap")
        assert "rolltap, models scripted; " in capsys.readouterr().out
    assert not await check_engine("http://127.0.0.1:1", "vllm")
    assert "can't be reached" in capsys.readouterr().out


def program(folder: Path, name: str, version: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {name} {version}\n")
    path.chmod(0o755)


async def test_it_names_the_harnesses_of_this_machine_and_the_tested_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLTAP_HARNESSES", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await check(None)
    assert "none that rolltap knows" in capsys.readouterr().out
    codex, pi = get_harness("codex").package, get_harness("pi").package
    assert codex is not None
    assert pi is not None
    program(tmp_path, codex.executable, "0.1.2")
    program(tmp_path, pi.executable, pi.version)
    assert await check(None), "an untested release breaks nothing"
    lines = capsys.readouterr().out.splitlines()
    rows = {name: line for line in lines for name in ("codex", "pi") if f"harness {name} " in line}
    assert f"0.1.2 on PATH; tested {codex.version}, " in rows["codex"]
    assert any(line.startswith("harness codex: rolltap harness install codex") for line in lines)
    assert f"tested {pi.version}, " in rows["pi"]
    assert "install" not in rows["pi"]


def test_the_list_of_harnesses_is_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("rolltap.cli.harness.installed", lambda harness: "10.10.10 on PATH")
    lines = CliRunner().invoke(app, ["harness", "list"]).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    for name in harness_names():
        assert any(line.split()[:2] == [name, get_harness(name).dialect] for line in lines), name
