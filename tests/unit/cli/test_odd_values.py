"""Whatever value an option, an argument or a setting gets, a mistake ends in one sentence without a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from rolltap.cli.main import app
from rolltap.errors import ConfigError
from rolltap.settings import EngineSettings, PolicySettings, Settings, load_settings

from ...conftest import ROOT
from .odd_values import NUMBERS, commands, type_of

DRAWN = 60


def test_every_number_of_the_command_line_has_a_smallest_value() -> None:
    """So that it is told before anything is started. A priority may be negative."""
    unbounded = [
        f"{' '.join(words)} --{parameter.name}"
        for words, command in commands(typer.main.get_command(app))
        for parameter in command.params
        if type_of(parameter) in NUMBERS and parameter.type_descriptor.parameter_info.min is None
    ]
    assert unbounded == ["run --priority"]


@pytest.mark.timeout(400)
def test_an_odd_value_ends_no_command_in_a_traceback(tmp_path: Path) -> None:
    """8 CPU seconds: a process for each of the commands drawn. `python -m tests.unit.cli.odd_values` runs all."""
    script = [sys.executable, "-m", "tests.unit.cli.odd_values", str(tmp_path), "38", str(DRAWN)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ROLLTAP_")}
    home = {**plain, "HOME": str(tmp_path / "home")}
    done = subprocess.run(script, cwd=ROOT, env=home, capture_output=True, text=True, check=True)
    *wrong, end = map(json.loads, done.stdout.splitlines())
    assert end == {"ran": DRAWN}
    assert wrong == []


def wrong_values(model: type[BaseModel]) -> list[tuple[str, Any]]:
    """Every key of a section, with values of three other types."""
    return [(name, value) for name in model.model_fields for value in ({"a": []}, [{}], "much", -1e308)]


SECTIONS: dict[str, type[BaseModel]] = {
    "engines.x": EngineSettings,
    "policies.x": PolicySettings,
    **{
        name: field.annotation
        for name, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    },
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_setting_of_another_type_is_named_without_a_word_of_the_validator(section: str) -> None:
    top, _, name = section.partition(".")
    messages: list[str] = []
    for key, value in wrong_values(SECTIONS[section]):
        table = {key: value}
        try:
            load_settings(None, **{top: {name: table} if name else table})
        except ConfigError as error:
            messages.append(error.message)
    assert len(messages) >= len(SECTIONS[section].model_fields)
    assert [each for each in messages if f"{section}." not in each] == []
    assert [each for each in messages if re.search(r"Input|instance|parse|None|valid|\bType", each)] == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ROLLTAP_LIMITS__BODY_MB", "-3"), ("rolltap_limits__body_mb", "-3"), ("ROLLTAP_LIMITS", '{"body_mb": -3}')],
)
def test_a_value_of_the_environment_names_its_variable(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's value may be right."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"settings: limits\.body_mb: .*\(from {variable.upper()}\)$"):
        load_settings(None, limits={"body_mb": 50})


@pytest.mark.parametrize("value", ['{"calls_at_once": 1}', "{}"])
def test_a_value_of_the_file_names_no_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTAP_LIMITS", value)
    with pytest.raises(ConfigError) as caught:
        load_settings(None, limits={"body_mb": -3})
    assert "ROLLTAP" not in str(caught.value)


def test_a_secret_in_the_wrong_place_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, keys={"admin": ["rt-secret"]})
    assert str(caught.value) == "settings: keys.admin: has to be a text"


@pytest.mark.parametrize("key", ["rt-\nsecret", "rt-secret\n", " rt-secret", "rt-secret\u20ac"])
@pytest.mark.parametrize("name", ["keys.admin", "engines.main.api_key"])
def test_a_key_that_no_request_can_carry_is_refused_and_not_shown(name: str, key: str) -> None:
    engine = {"url": "http://127.0.0.1:1", "api_key": key if name.startswith("engines") else ""}
    keys = {"admin": key if name.startswith("keys") else ""}
    with pytest.raises(ConfigError) as caught:
        load_settings(None, engines={"main": engine}, keys=keys)
    assert str(caught.value).startswith(f"settings: {name}")
    assert "secret" not in str(caught.value)
