"""`rolltap try`: what is missing is said at once, and nothing is overwritten. Real harnesses: tests/harnesses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli import try_
from rolltap.cli.main import app
from rolltap.engine.scripted import load_script
from rolltap.engine.scripted.script import Script


@pytest.fixture(autouse=True)
def signals_stay() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_all_that_is_missing_is_named_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLTAP_HARNESSES", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("rolltap.cli.try_.bubblewrap.refusal", lambda: "bwrap is not installed")
    output = CliRunner().invoke(app, ["try", "codex"]).output
    assert "Node.js 20+ with npm" in output
    assert "apt install bubblewrap" in output
    assert "--no-sandbox" in output
    assert list(tmp_path.iterdir()) == []


def test_a_typo_lists_the_known_names_and_a_strange_one_those_of_the_script() -> None:
    assert "codex" in CliRunner().invoke(app, ["try", "codx"]).output
    assert "opencode" in CliRunner().invoke(app, ["try", "aider"]).output


def test_its_folder_is_always_a_new_one(tmp_path: Path) -> None:
    names = [try_.fresh(tmp_path / "rolltap-try").name for _ in range(3)]
    assert names == ["rolltap-try", "rolltap-try-2", "rolltap-try-3"]


def test_its_script_is_that_of_the_example() -> None:
    script = load_script(try_.SCRIPT)
    assert isinstance(script, Script)
    assert all(rule.turns[-1].say == "I wrote hello.txt." for rule in script.rules)
    example = Path(__file__).parents[3] / "examples" / "no-gpu" / "engine.toml"
    assert example.read_bytes() == try_.SCRIPT.read_bytes()
