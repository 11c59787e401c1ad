"""What a newcomer gets wrong ends in one line that says what to change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.cli.serve import exports, settings_from
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


VENDOR = '[engines.v]\nkind = "passthrough"\nurl = "https://vendor.example"\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            VENDOR + 'dialects = ["smoke"]\n',
            "engines.v.dialects: no dialect 'smoke'; known: openai_chat, openai_r",
        ),
        ('[engines.v]\nurl = "http://gpu"\ndialects = ["gemini"]\n', "engines.v.dialects: only kind passthrough"),
        (VENDOR + '[policies.p]\nengine = "v"\n[policies.p.pin]\ntemperature = 0.5\n', "policies.p.pin: passthrough"),
        (VENDOR + '[policies.p]\nengine = "v"\ntokenizer = "t"\n', "policies.p.tokenizer: passthrough"),
        (VENDOR.replace("https:", "ftp:") + '[policies.p]\nengine = "v"\n', "engines.v.url: want the http(s) URL"),
        (
            VENDOR.replace(".example", ",http://b") + '[policies.p]\nengine = "v"\n',
            "engines.v.url: want the http(s) URL",
        ),
    ],
)
def test_what_passthrough_cannot_do_is_named(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "rolltap.toml"
    path.write_text(f'data = "{tmp_path}"\n{text}')
    assert line in said("serve", "--config", str(path))


def test_an_unknown_engine_kind_lists_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "rolltap.toml"
    path.write_text(f'data = "{tmp_path}"\n[engines.main]\nkind = "toy"\nurl = "http://gpu"\n')
    output = said("serve", "--config", str(path))
    assert "engines.main.kind: no engine kind 'toy'; known: llamacpp, rolltap, sglang, vllm" in output
    assert "openai_compatible, passthrough" in output


def test_capture_without_an_engine_goes_to_the_vendors_under_the_users_own_keys() -> None:
    quick = {"engine": None, "kind": "vllm", "tokenizer": None, "family": "", "policy": "default", "model": ""}
    settings = settings_from(None, quick, None, capture=True)
    assert exports(settings, "http://here")[:3] == [
        "export OPENAI_BASE_URL=http://here/v1",
        "export ANTHROPIC_BASE_URL=http://here",
        "export GOOGLE_GEMINI_BASE_URL=http://here",
    ]
    local = settings_from(None, {**quick, "engine": "http://gpu", "kind": "openai_compatible"}, None, capture=True)
    assert "OPENAI_API_KEY=" in exports(local, "http://here")[0]


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
