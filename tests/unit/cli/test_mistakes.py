"""What a newcomer gets wrong ends in one line that says what to change."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import rolltap
from rolltap.calllog.sql import open_call_log
from rolltap.cli.main import app
from rolltap.cli.screen import Screen
from rolltap.cli.serve import _banner, exports, settings_from, stored_key
from rolltap.cli.up import check_cluster
from rolltap.contract.keys import KeyBudget, KeyRecord, KeyUsage
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.http_client import HttpClient
from rolltap.ids import new_id
from rolltap.settings import Settings, load_settings

from .plane import served, shown, stub_plane


def said(*arguments: str) -> str:
    """What a command that fails prints; it must be one line."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.output.strip().count("\n") == 0
    return result.output


PORTS = [text for plane in ("agent", "trainer", "admin") for text in (f"--{plane}-port", "0")]
CAPTURE = ["serve", "--capture", *PORTS]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*CAPTURE, "--data", "file"], "data: file is a file"),
        ([*CAPTURE, "--data", "file/folder"], "file/folder: Not a directory"),
        ([*CAPTURE, "--data", "no_listening"], "no_listening/listening.json: Is a directory"),
        ([*CAPTURE, "--data", "no_keys"], "no_keys/keys.toml: Is a directory"),
        ([*CAPTURE, "--data", "odd_keys"], "odd_keys/keys.toml is not TOML"),
        (["serve", "--config", "data_is_a_file.toml", *PORTS], "data: file is a file"),
        (["log", "backup", "file/copy.db", "--store", "sqlite:///store.db"], "file/copy.db"),
        (["log", "export", "file/keep.rtlog", "--store", "sqlite:///store.db"], "file/keep.rtlog"),
        (["view", "--html", "file/page.html", "SESSION"], "file/page.html: Not a directory"),
    ],
)
def test_a_path_that_can_not_be_used_is_named(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a folder")
    Path("data_is_a_file.toml").write_text('data = "file"\n')
    Path("no_listening/listening.json").mkdir(parents=True)
    Path("no_keys/keys.toml").mkdir(parents=True)
    Path("odd_keys").mkdir()
    Path("odd_keys/keys.toml").write_text("admin = rt-admin\n")
    CliRunner().invoke(app, ["log", "upgrade", "--store", "sqlite:///store.db"])

    async def page(*_: object) -> str:
        return "a page"

    monkeypatch.setattr("rolltap.cli.view._page", page)
    output = said(*arguments).strip()
    assert output.startswith("rolltap: ")
    assert named in output


def test_the_doctor_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("rolltap.cli.doctor.EXTRAS", {"tokens": ("no_such_module",)})
    assert install_line("tokens") in CliRunner().invoke(app, ["doctor"]).output


def test_the_doctor_names_a_policy_whose_tokenizer_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    config = tmp_path / "rolltap.toml"
    config.write_text(
        '[engines.main]\nurl = "http://127.0.0.1:1"\n[policies.coder]\nengine = "main"\ntokenizer = "./coder"\n'
    )
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "no tokenizer.json in ./coder" in result.output


def test_tasks_that_are_not_there_are_not_taken_for_a_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tasks: no such file or folder of tasks" in said("run", "tasks", "--harness", "codex")


def test_training_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "rolltap.trainer_client.run.loop", None)
    output = said("train", "--policy", "p", "--model", "m", "--out", "run", "--key", "k")
    assert install_line("train") in output


def test_one_file_holds_the_settings_of_the_server_and_of_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "rolltap.toml"
    path.write_text('data = "here"\n[trainer]\ngroups = 4\n')
    assert load_settings(path).data == tmp_path / "here"


@pytest.mark.parametrize(
    ("text", "said_of_it"),
    [
        ("[listen]\nagent_prot = 1\n", "listen.agent_prot: no such key; did you mean listen.agent_port?"),
        ("[listn]\nagent_port = 1\n", "listn: no such key; did you mean listen?"),
        ("[listen]\nbody_mb = 1\n", "listen.body_mb: no such key; did you mean limits.body_mb?"),
        (
            "[engines.m]\nurl = 'http://m'\nkinds = 'vllm'\n",
            "engines.m.kinds: no such key; did you mean engines.m.kind?",
        ),
        ("[policies.p]\nengin = 'm'\n", "policies.p.engin: no such key; did you mean policies.p.engine?"),
        (
            "[policies.p]\nengine = 'm'\n[policies.p.pin]\ntemprature = 1\n",
            "policies.p.pin.temprature: no such key; did you mean policies.p.pin.temperature?",
        ),
        ("colour = 1\n", "colour: no such key; the known ones are in docs/settings.md"),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_is_meant(tmp_path: Path, text: str, said_of_it: str) -> None:
    path = tmp_path / "rolltap.toml"
    path.write_text(text)
    assert said_of_it in said("serve", "--config", str(path))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LISTEN__AGENT_PROT", "LISTEN__AGENT_PORT"),
        ("LISTN__AGENT_PORT", "LISTEN__AGENT_PORT"),
        ("LISTN__AGENT_PROT", "LISTEN__AGENT_PORT"),
        ("LISTEN___AGENT_PORT", "LISTEN__AGENT_PORT"),
        ("SERVER__AGENT_PORT", "LISTEN__AGENT_PORT"),
        ("LISTEN__BODY_MB", "LIMITS__BODY_MB"),
        ("LISTN__COLOUR", "LISTEN"),
        ("LISTEN_AGENT_PORT", "LISTEN__AGENT_PORT"),
        ("LISTN_AGENT_PORT", "LISTEN__AGENT_PORT"),
        ("AGENT_PORT", "LISTEN__AGENT_PORT"),
        ("STORE_URI", "STORE__URL"),
        ("DATTA", "DATA"),
        ("ENGINE__MAIN__URL", "ENGINES__MAIN__URL"),
        ("POLICY__P__PIN__TEMPRATURE", "POLICIES__P__PIN__TEMPERATURE"),
        ("ENGINES__MAIN__KINDS", "ENGINES__MAIN__KIND"),
        ("POLICIES__P__PIN__TEMPRATURE", "POLICIES__P__PIN__TEMPERATURE"),
    ],
)
def test_a_variable_that_is_no_setting_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"ROLLTAP_{name}", "1")
    with pytest.raises(ConfigError, match=f"^ROLLTAP_{name}: no such setting; did you mean ROLLTAP_{meant}\\?$"):
        load_settings()


NAMED = {
    name
    for folder, _, files in os.walk(Path(rolltap.__file__).parent, followlinks=True)
    for file in files
    if file.endswith(".py")
    for name in re.findall(r"ROLLTAP_([A-Z]+(?:_[A-Z]+)*)(?![A-Z_])", Path(folder, file).read_text(encoding="utf-8"))
}
"""What rolltap itself calls its variables that are no settings."""


def test_variables_that_commands_and_the_trainer_read_are_no_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*NAMED, "TRAINER__STEPS", "KUBERNETES_SERVICE_HOST", "ADMIN_SERVICE_PORT", "ADMIN_PORT_8712_TCP_PORT"):
        monkeypatch.setenv(f"ROLLTAP_{name}", "1")
    for name in ("PORT", "ADMIN_PORT", "STORE_PORT"):  # of Services rolltap, rolltap-admin, rolltap-store
        monkeypatch.setenv(f"ROLLTAP_{name}", "tcp://10.0.0.1:8712")
    monkeypatch.setenv("ROLLTAP_LISTEN__AGENT_PORT", "9000")
    assert load_settings().listen.agent_port == 9000


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
        (VENDOR.replace("https:", "ftp:") + '[policies.p]\nengine = "v"\n', "engines.v.url: expected the http(s) URL"),
        (
            VENDOR.replace(".example", ",http://b") + '[policies.p]\nengine = "v"\n',
            "engines.v.url: expected the http(s) URL",
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
    assert "engines.main.kind: no engine kind 'toy'; known: llamacpp, rolltap, sglang, tinker, vllm" in output
    assert "openai_compatible, passthrough" in output


def test_capture_without_an_engine_goes_to_the_vendors_under_the_users_own_keys() -> None:
    quick: dict[str, Any] = dict.fromkeys(("engine", "kind", "tokenizer", "family", "policy", "model"))
    settings = settings_from(None, quick, None, capture=True)
    assert exports(settings, "http://here")[:3] == [
        "export OPENAI_BASE_URL=http://here/v1",
        "export ANTHROPIC_BASE_URL=http://here",
        "export GOOGLE_GEMINI_BASE_URL=http://here",
    ]
    local = settings_from(None, {**quick, "engine": "http://gpu", "kind": "openai_compatible"}, None, capture=True)
    key = local.keys.project
    assert exports(local, "http://here")[0] == f"export OPENAI_BASE_URL=http://here/v1 OPENAI_API_KEY={key}"
    codex = f"CODEX_API_KEY={key} codex exec -c openai_base_url=http://here/v1  # Codex reads no OPENAI_BASE_URL"
    assert exports(local, "http://here")[-1] == codex
    assert exports(settings, "http://here")[-1].startswith("codex -c openai_base_url=http://here/v1 ")


@pytest.mark.parametrize(
    "command",
    [
        ["run", "command", "--policy", "theirs", "--", "true"],
        ["run", "tasks.jsonl", "-a", "command", "--policy", "a=mine,b=theirs"],
        ["harness", "env", "pi", "--policy", "theirs"],
        ["harness", "env", "pi", "--session", "s1", "--key", "k"],
    ],
)
def test_a_policy_that_takes_only_the_users_own_key_is_refused_before_a_session_is_opened(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLTAP_ADMIN_KEY", "k")
    Path("tasks.jsonl").write_text(
        '{"id": "t", "instruction": "Go.", "evaluator": {"kind": "command", "command": "true"}}\n'
    )
    policies = [served("mine"), served("theirs", relayed=("anthropic",))]
    replies = {"GET /policies": {"policies": policies}, "GET /read/sessions/s1": shown("s1", policy="theirs")}
    with stub_plane(replies) as plane:
        at = command.index("--") if "--" in command else len(command)
        line = said(*command[:at], "--url", plane.url, *command[at:])
    assert "theirs: calls are relayed to the vendor under your own key" in line
    assert "rolltap sessions open --policy theirs" in line
    assert not any(name.startswith("POST") for name, _ in plane.requests)


@pytest.mark.parametrize("option", ["kind", "tokenizer", "family", "policy", "model"])
@pytest.mark.parametrize("config", [True, False])
def test_options_of_the_engine_are_refused_without_it(
    option: str, config: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if config:
        Path("rolltap.toml").write_text(VENDOR + '[policies.p]\nengine = "v"\n')
    line = said(*CAPTURE, f"--{option}", "vllm")
    assert line.startswith(f"rolltap: --{option} needs --engine URL;")
    assert [path.name for path in tmp_path.iterdir()] == (["rolltap.toml"] if config else [])


def test_a_hub_name_is_no_tokenizer_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = said("serve", "--engine", "http://127.0.0.1:1", "--tokenizer", "Qwen/Qwen3-8B", "--policy", "p", *PORTS)
    assert "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B" in line


def test_serve_without_a_tokenizer_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = said("serve", "--engine", "http://127.0.0.1:1", "--policy", "p", *PORTS)
    assert "policies.p.tokenizer" in line
    assert "--tokenizer FOLDER" in line


def test_a_start_that_fails_leaves_no_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tokenizer folder 'nothere'" in said(
        "serve", "--engine", "http://127.0.0.1:1", "--tokenizer", "nothere", *PORTS
    )
    assert list(tmp_path.iterdir()) == []
    there = said("serve", "--engine", "http://127.0.0.1:1", "--tokenizer", str(tmp_path), *PORTS)
    assert "it has no tokenizer.json; name the folder that the model was downloaded to" in there
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"can't listen on 127.0.0.1:{port}" in said(*CAPTURE, "--admin-port", str(port))
    assert list(tmp_path.iterdir()) == []


def test_the_banner_hides_the_stores_password(tmp_path: Path) -> None:
    url = "postgresql://postgres:s3cret-pw@127.0.0.1:5432/rolltap"
    settings = Settings.model_validate({"data": tmp_path, "store": {"url": url}})
    console = Screen(width=200, file=io.StringIO())
    console.print(_banner(SimpleNamespace(settings=settings, policies=[]), {}))
    assert isinstance(console.file, io.StringIO)
    assert "postgres:***@127.0.0.1" in console.file.getvalue()
    assert "s3cret-pw" not in console.file.getvalue()


@pytest.mark.parametrize("command", [["sessions", "open"], ["status"], ["keys", "list"], ["rollout", "r1"]])
def test_before_the_first_serve_a_command_says_to_serve(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ROLLTAP_ADMIN_KEY", "ROLLTAP_DATA"):
        monkeypatch.delenv(name, raising=False)
    line = said(*command)
    assert f"no server was started with the data folder {tmp_path}/rolltap-data: run `rolltap serve` first" in line
    assert "ROLLTAP_ADMIN_URL and ROLLTAP_ADMIN_KEY (`rolltap keys mint admin --name NAME` beside the server" in line


@pytest.mark.parametrize("command", [["export", "jsonl"], ["log", "stats"]])
def test_a_store_that_is_not_there_is_named_with_what_to_do(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLTAP_DATA", raising=False)
    assert "rolltap.db: start `rolltap serve` here, or name the store with --store" in said(*command)


def test_the_command_for_a_missing_key_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLTAP_ADMIN_KEY", raising=False)
    (tmp_path / "rolltap-data").mkdir()
    (tmp_path / "rolltap-data/keys.toml").write_text('trainer = "rt-t"\n')
    line = said("sessions", "list", "--url", "http://127.0.0.1:1")
    assert "`rolltap keys mint admin --name NAME` makes one" in line
    assert f"no admin key in {tmp_path}/rolltap-data/keys.toml: set ROLLTAP_DATA to the absolute path" in line


def test_a_relative_data_folder_is_beside_the_file_for_clients_as_for_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.delenv("ROLLTAP_ADMIN_KEY", raising=False)
    (tmp_path / "rolltap.toml").write_text('data = "kept"\n')
    line = said("sessions", "list", "-c", "../rolltap.toml", "--url", "http://127.0.0.1:1")
    assert f"no server was started with the data folder {tmp_path}/kept: " in line


PATHS = """
data = "d"
[store]
url = "sqlite:///s.db"
[listen]
tls_certificate = "c.pem"
tls_key = "k.pem"
[engines.e]
url = "http://e"
[policies.p]
engine = "e"
tokenizer = "./m"
metrics = "run/metrics.jsonl"
"""


def test_relative_paths_of_a_file_are_beside_it_wherever_a_command_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    file = project / "rolltap.toml"
    file.write_text(PATHS)
    for start, named in ((project, "rolltap.toml"), (elsewhere, "../project/rolltap.toml"), (elsewhere, str(file))):
        monkeypatch.chdir(start)
        settings = load_settings(Path(named))
        listen, policy = settings.listen, settings.policies["p"]
        found = (settings.data, listen.tls_certificate, listen.tls_key, policy.tokenizer, policy.metrics)
        assert [Path(path).absolute() for path in found] == [
            project / name for name in ("d", "c.pem", "k.pem", "m", "run/metrics.jsonl")
        ]
        assert settings.store_file == project / "s.db"
    assert load_settings(file, data=Path("own")).data == Path("own"), "an option is of the folder where it is given"
    monkeypatch.setenv("ROLLTAP_STORE__URL", "sqlite:///own.db")
    assert load_settings(file).store_url == f"sqlite:///{elsewhere}/own.db"


@pytest.mark.parametrize("text", ["", 'data = "kept"\n', '[store]\nurl = "sqlite:///kept.db"\n'])
def test_a_command_elsewhere_finds_the_store_and_makes_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "rolltap.toml").write_text(text)
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("ROLLTAP_DATA", raising=False)
    commands = (["stats"], ["verify"], ["upgrade"], ["prune", "--older-than", "1d"])
    for config in ([], ["-c", "../project/rolltap.toml"]):
        for command in (*commands, ["backup", "copy.db"]):
            assert "there is no database at " in said("log", *command, *config)
        CliRunner().invoke(app, ["doctor", *config])
    assert [*elsewhere.iterdir(), *project.iterdir()] == [project / "rolltap.toml"]

    async def begin() -> None:
        log = open_call_log(load_settings(project / "rolltap.toml").store_url)
        await log.start()
        await log.close()

    asyncio.run(begin())
    for command in commands:
        result = CliRunner().invoke(app, ["log", *command, "-c", "../project/rolltap.toml"])
        assert result.exit_code == 0, result.output
    assert list(elsewhere.iterdir()) == []
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (elsewhere / "runs.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    imported = CliRunner().invoke(app, ["import", "runs.jsonl"])
    assert f"a new record begins: {elsewhere}/rolltap-data/rolltap.db\n" in imported.output
    assert "a new record" not in CliRunner().invoke(app, ["import", "runs.jsonl"]).output


def test_a_data_folder_where_the_command_starts_is_not_left_behind_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/rolltap.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLTAP_DATA", raising=False)
    Path("rolltap-data").mkdir()
    Path("rolltap-data/keys.toml").write_text('admin = "rt-old"\n')
    line = said("serve", "-c", "project/rolltap.toml")
    assert "'rolltap-data' is looked up in the folder of project/rolltap.toml, where there is none; move there" in line
    assert f"what is in {tmp_path}/rolltap-data, or name that path as `data`" in line
    assert load_settings(Path("project/rolltap.toml"), data=Path("rolltap-data")).data == Path("rolltap-data")


def test_a_key_that_the_server_does_not_know_is_named_by_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLTAP_ADMIN_KEY", raising=False)
    Path("rolltap-data").mkdir()
    Path("rolltap-data/keys.toml").write_text('admin = "rt-old"\n')
    with stub_plane({}, known=False) as plane:
        for origin in ("the admin key of rolltap-data/keys.toml", "that of ROLLTAP_ADMIN_KEY"):
            line = said("sessions", "open", "--url", plane.url)
            assert f"{plane.url}: the key is not known; it is {origin}" in line
            monkeypatch.setenv("ROLLTAP_ADMIN_KEY", "k")


def test_a_server_without_tls_is_not_said_to_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTAP_ADMIN_KEY", "k")
    with stub_plane({}) as plane:
        line = said("sessions", "list", "--url", plane.url.replace("http:", "https:"))
    assert "(what answers there speaks http, not https)" in line


def test_a_refused_connection_is_told_without_asyncios_words() -> None:
    refusal = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)")
    assert "(Connection refused)" in HttpClient("http://127.0.0.1:1", "k").unreachable(refusal).message


def minted(id: str) -> dict[str, Any]:
    """A project's key as `GET /keys` lists it."""
    used, budget = KeyUsage(12, 34_567, 1_000_000), KeyBudget(calls=1000)
    key = KeyRecord(id, "nightly run", "project", ("my-model",), "admin", 0.0, None, None, "default", budget, used)
    return json.loads(msgspec.json.encode(key))


def test_a_narrow_list_of_keys_has_whole_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("ROLLTAP_ADMIN_KEY", "k")
    key = minted(new_id())
    with stub_plane({"GET /keys": {"keys": [key]}}) as plane:
        output = CliRunner().invoke(app, ["keys", "list", "--url", plane.url]).output
        as_json = CliRunner().invoke(app, ["keys", "list", "--json", "--url", plane.url]).output
    assert key["id"] in output
    assert json.loads(as_json) == [key]


def test_a_key_is_named_by_what_only_its_id_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTAP_ADMIN_KEY", "k")
    whole, *others = "01abc" + "0" * 21, "01abd" + "1" * 21, "01abd" + "2" * 21
    revoked = {"revoked": [whole]}
    keys = {"keys": [minted(id) for id in (whole, *others)]}
    with stub_plane({"GET /keys": keys, f"POST /keys/{whole}/revoke": revoked}) as plane:
        result = CliRunner().invoke(app, ["keys", "revoke", "01abc", "--url", plane.url])
        assert result.output == f"key {whole} is revoked\n"
        assert f"'01abd' begins several keys: {', '.join(others)}" in said(
            "keys", "revoke", "01abd", "--url", plane.url
        )
        assert all(name == "GET /keys" or whole in name for name, _ in plane.requests), "nothing else was revoked"


def test_a_tag_without_a_value_is_refused() -> None:
    assert "--tag: expected NAME=VALUE, not 'nightly'" in said("sessions", "open", "--tag", "nightly")


def test_a_missing_file_to_import_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "missing.jsonl"
    assert said("import", str(path)).count("missing.jsonl") == 1


def test_the_demo_without_its_extra_names_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rolltap.cli.doctor.EXTRAS", {"tokens": (), "train": (), "demo": ("nothing",), "export": ()})
    assert install_line("demo") in said("demo")
    assert not (tmp_path / "demo-out").exists()


def test_a_task_file_that_is_not_there_is_no_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "missing.jsonl: no such file" in said("run", "missing.jsonl")


@pytest.mark.parametrize("where", ["gsm8k", "folder/tasks.jsonl"])
def test_a_mistyped_kind_of_tasks_lists_the_kinds(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = said("run", f"verifers:{where}", "--n", "8")
    assert line.startswith("rolltap: no kind of tasks 'verifers'; known: ")
    assert "verifiers" in line


def test_a_ray_cluster_on_other_machines_needs_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    for own in ("local", "auto", "127.0.0.1:6379", "ray://localhost:10001"):
        check_cluster(own)
    for other in ("10.0.0.5:6379", "ray://head.example:10001"):
        with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
            check_cluster(other)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_cluster("10.0.0.5:6379")


TRAINED = ["--policy", "p", "--model", str(FOLDER), "--out", "run", "--key", "k", "--url", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "codx", "--", "hi"], "did you mean codex?"),
        (["run", "file.jsonl", "--harness", "codx"], "did you mean codex?"),
        (["serve", "--engine", "notaurl"], "engines.main.url"),
        (["serve", "--engine", "http://127.0.0.1:1", "--kind", "vlm"], "did you mean vllm?"),
        (["serve", "--engine", "http://127.0.0.1:1", "--kind", "ollama"], "for ollama it is openai_compatible (docs/"),
        (["serve", "--engine", "http://127.0.0.1:1", "--kind", "tensorrt-llm"], "for tensorrt-llm it is openai_compat"),
        (
            ["run", "typo.jsonl", "--harness", "codex"],
            "typo.jsonl:1: the task can't be used: unknown field `instrution`; ",
        ),
        (["train", *TRAINED, "--recipe", "mine.py"], "the recipe mine.py can't be loaded: there is no such file"),
        (
            ["sessions", "list", "--url", "127.0.0.1:8712"],
            "--url: '127.0.0.1:8712' is not an http(s) URL; write http://1",
        ),
        (["serve", "--capture", "--host", "no.such.invalid"], "name an address of this machine: --host"),
        (
            ["serve", "--capture", "--trainer-port", "8099", "--admin-port", "8099"],
            "trainer and the admin plane both have",
        ),
        (["serve", "--capture", "--config", "tls.toml"], "listen.tls_certificate, tls_key: can't be read as PEM files"),
        (
            ["serve", "--engine", "http://[", "--tokenizer", str(FOLDER)],
            "engines.main.url: 'http://[' is not an http(s)",
        ),
        (["demo", "--recipe", "grpoo"], "did you mean grpo?"),
        (["export", "out", "--for", "trll"], "did you mean trl?"),
        (
            ["serve", "--engine", "http://127.0.0.1:1", "--tokenizer", str(FOLDER), "--family", "qwen33"],
            "did you mean qwen3?",
        ),
        (["view", "file.jsonl"], "file.jsonl is another file than a store's, or a damaged one: restore that from a b"),
    ],
)
def test_a_typo_is_told_before_what_is_missing(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server runs, and no tokenizer is named."""
    monkeypatch.chdir(tmp_path)
    Path("file.jsonl").write_text("a line\n" * 200)
    Path("tls.toml").write_text("[listen]\ntls_certificate = 'file.jsonl'\n")
    Path("typo.jsonl").write_text('{"id": "t", "instrution": "Go."}\n')
    ports = PORTS if arguments[0] == "serve" and "--admin-port" not in arguments else ()
    assert named in said(*arguments, *ports)


def test_where_no_terminal_reads_it_the_start_shows_no_key_and_no_link(tmp_path: Path) -> None:
    """What a journal keeps: the lines still work, as they read the key from its file."""
    settings = load_settings(
        None,
        data=tmp_path,
        keys={"project": "rt-project-x"},
        engines={"main": {"kind": "openai_compatible", "url": "http://127.0.0.1:1/v1"}},
        policies={"default": {"engine": "main"}},
    )
    (tmp_path / "keys.toml").write_text('admin = "a"\nproject = "rt-project-x"\n')
    lines = exports(settings, "http://127.0.0.1:8710", stored_key(settings))
    assert not any("rt-project-x" in line for line in lines)
    line = next(line for line in lines if line.startswith("export OPENAI_BASE_URL"))
    shown = subprocess.run(["sh", "-c", f"{line}; env"], capture_output=True, text=True, check=True).stdout
    assert "=rt-project-x\n" in shown


def test_a_full_disk_is_told_in_a_line() -> None:
    """Also where it is behind standard output."""
    command = f"{sys.executable} -m rolltap harness show codex > /dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "rolltap: can't write: No space left on device\n")
