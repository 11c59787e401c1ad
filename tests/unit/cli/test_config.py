"""`rolltap config`: the file is made of the settings, and says what they are."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.engine.tiny import FOLDER
from rolltap.settings import Settings, load_settings


def made(*arguments: str) -> Path:
    result = CliRunner().invoke(app, ["config", "init", *arguments])
    assert result.exit_code == 0, result.output
    return Path("rolltap.toml")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_file_loads_as_it_is_and_with_every_line_taken_in() -> None:
    path = made("--engine", "http://127.0.0.1:9", "--kind", "sglang", "--policy", "my.model", "--tokenizer", "./m")
    settings = load_settings(path)
    assert (settings.engines["main"].url, settings.engines["main"].kind) == ("http://127.0.0.1:9", "sglang")
    assert settings.policies["my.model"].tokenizer == "./m"
    path.write_text(re.sub(r"^#(\w+ = )", r"\1", path.read_text(), flags=re.MULTILINE))
    whole = load_settings(path)
    assert whole == settings
    keys = tomllib.loads(path.read_text())
    assert keys.keys() == Settings.model_fields.keys()
    assert keys["limits"].keys() == type(settings.limits).model_fields.keys()
    jsonschema.validate(keys, json.loads(CliRunner().invoke(app, ["config", "schema"]).output))


def test_the_schema_refuses_what_the_settings_refuse() -> None:
    schema = json.loads(CliRunner().invoke(app, ["config", "schema"]).output)
    with pytest.raises(jsonschema.ValidationError, match="adress"):
        jsonschema.validate({"listen": {"adress": "x"}}, schema)
    jsonschema.validate({"trainer": {"steps": 3}}, schema)


def test_a_file_that_is_there_is_kept() -> None:
    path = made()
    path.write_text("mine")
    result = CliRunner().invoke(app, ["config", "init"])
    assert (result.exit_code, result.output) == (1, "rolltap: rolltap.toml exists; name another file\n")
    assert path.read_text() == "mine"


SERVE = "`rolltap serve --config rolltap.toml`"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), f"before {SERVE}: settings: policies.default.tokenizer: "),
        (("--tokenizer", "gone"), f"before {SERVE}: cannot read the tokenizer folder"),
        (("--kind", "openai_compatible"), f"{SERVE} starts it"),
        (("--tokenizer", str(FOLDER)), f"{SERVE} starts it"),
    ],
)
def test_what_is_left_to_do_is_said(arguments: tuple[str, ...], line: str) -> None:
    result = CliRunner().invoke(app, ["config", "init", *arguments])
    assert result.output.startswith(f"rolltap.toml: written; {line}"), result.output
