"""Client commands find the server that `rolltap serve` starts with the same settings."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.common import plane_url
from rolltap.cli.main import app
from rolltap.cli.server_address import FILE, claimed
from rolltap.errors import ConfigError
from rolltap.harnesses.agents.registry import HARNESSES
from rolltap.settings import Settings

from .plane import served, shown, stub_plane

LIST = {"GET /read/sessions?limit=100": {"sessions": [], "total": 0, "indexed": 1.0}}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def keep_key(folder: Path, key: str = "rt-admin-kept") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "keys.toml").write_text(f'admin = "{key}"\n')


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLTAP_ADMIN_URL", raising=False)
    monkeypatch.delenv("ROLLTAP_ADMIN_KEY", raising=False)
    return tmp_path


def test_the_settings_file_names_port_and_data_folder(here: Path) -> None:
    with stub_plane(LIST) as plane:
        (here / "rolltap.toml").write_text(f'data = "elsewhere"\n[listen]\nadmin_port = {plane.port}\n')
        keep_key(here / "elsewhere")
        run("sessions", "list")
        assert plane.requests == [("GET /read/sessions?limit=100", "Bearer rt-admin-kept")]


def test_so_does_the_environment_that_serve_reads(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_plane(LIST) as plane:
        monkeypatch.setenv("ROLLTAP_LISTEN__ADMIN_PORT", str(plane.port))
        monkeypatch.setenv("ROLLTAP_KEYS__ADMIN", "chosen")
        run("sessions", "list")
        assert plane.requests == [("GET /read/sessions?limit=100", "Bearer chosen")]


def test_an_option_names_another_server(here: Path) -> None:
    with stub_plane(LIST) as plane:
        (here / "rolltap.toml").write_text("[listen]\nadmin_port = 1\n")
        keep_key(here / "rolltap-data")
        run("sessions", "list", "--url", plane.url)
        assert len(plane.requests) == 1


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ({}, "http://127.0.0.1:8712"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8712"),
        ({"host": "::", "admin_port": 9}, "http://[::1]:9"),
    ],
)
def test_an_address_that_this_machine_can_call(listen: dict[str, object], url: str) -> None:
    assert plane_url(Settings.model_validate({"listen": listen}), "admin") == url


def test_a_free_port_is_known_from_the_server_of_the_data_folder(here: Path) -> None:
    settings = Settings.model_validate({"listen": {"admin_port": 0}})
    with pytest.raises(ConfigError, match=r"listen\.admin_port is 0, and no server runs with the data folder"):
        plane_url(settings, "admin")
    with stub_plane(LIST) as plane, claimed(settings.data) as listening:
        keep_key(here / "rolltap-data")
        listening.write({"admin": plane.url, "agent": "http://here:1", "trainer": "http://here:2"})
        assert stat.S_IMODE((settings.data / FILE).stat().st_mode) == 0o600
        assert plane_url(settings, "agent") == "http://here:1"
        run("sessions", "list")
        assert len(plane.requests) == 1
    with pytest.raises(ConfigError, match="no server runs"):  # it ended by itself
        plane_url(settings, "admin")


SERVER = """
import os, sys
from pathlib import Path
from rolltap.cli.server_address import claimed
with claimed(Path(sys.argv[1])) as listening:
    listening.write({"admin": "http://here:7", "agent": "http://here:8", "trainer": "http://here:9"})
    print("listens", flush=True)
    sys.stdin.read()
"""


def test_a_killed_servers_file_says_so_and_keeps_nobody_from_starting(here: Path) -> None:
    data = here / "rolltap-data"
    keep_key(data)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        with (
            pytest.raises(ConfigError, match=rf"already runs on http://here:7 \(process {server.pid}\).*--data"),
            claimed(data),
        ):
            pass
        server.kill()
    result = CliRunner().invoke(app, ["sessions", "list"])
    assert result.exit_code == 1
    assert "http://here:7 was killed" in result.output
    assert "start `rolltap serve` again" in " ".join(result.output.split())
    with claimed(data) as listening:
        listening.write({"admin": "http://here:17", "agent": "http://here:18", "trainer": "http://here:19"})
        assert plane_url(Settings(), "admin") == "http://here:17"


def test_status_says_how_many_groups_are_stale(here: Path) -> None:
    keep_key(here / "rolltap-data")
    policies = [served("coder", groups={"complete": 1, "stale": 2}), served("judge")]
    with stub_plane({"GET /tasks": {"submissions": []}, "GET /policies": {"policies": policies}}) as plane:
        output = run("status", "--url", plane.url)
    assert output.splitlines()[-1] == "coder: 2 groups lost: too stale, or of weights that a rewind abandoned"


OPENED = {"session_id": "s1", "key": "k-1", "base_url": "http://here:8710/s/s1", "policy": "my-model", "expires_at": 0}
OWN = served("my-model")
OPENS = {"POST /sessions": OPENED, "GET /policies": {"policies": [OWN]}, "GET /policies/my-model": OWN}


def test_an_opened_session_says_its_model_and_how_codex_is_pointed(here: Path) -> None:
    keep_key(here / "rolltap-data")
    with stub_plane(OPENS) as plane:
        output = run("sessions", "open", "--url", plane.url)
    assert "model my-model" in output
    assert "rolltap harness env codex --session s1 --key k-1" in output


def test_env_asks_the_server_for_address_key_and_model(here: Path) -> None:
    keep_key(here / "rolltap-data")
    with stub_plane(OPENS) as plane:
        output = run("harness", "env", "codex", "--url", plane.url)
    assert "http://here:8710/s/s1" in output
    assert output.startswith("# session s1, model my-model")
    assert "k-1" in output
    assert "-m my-model" in output
    switch = "--dangerously-bypass-approvals-and-sandbox"
    assert f"# codex is started with {switch} and may do whatever you can" in output


def test_env_finds_a_harness_that_is_in_the_cache_only(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_key(here / "rolltap-data")
    monkeypatch.setenv("ROLLTAP_HARNESSES", str(here))
    monkeypatch.setenv("PATH", str(here / "none"))
    package = HARNESSES["codex"].package
    assert package is not None
    folder = here / f"openai-codex-{package.version}"
    folder.mkdir()
    stamp = {"bins": [f"{folder}/bin"], "needs": [], "versions": {}, "seconds": 1.0}
    (folder / "installed.json").write_text(json.dumps(stamp))
    with stub_plane(OPENS) as plane:
        assert f'export PATH={folder}/bin:"$PATH"' in run("harness", "env", "codex", "--url", plane.url)
        monkeypatch.setenv("ROLLTAP_HARNESSES", str(here / "none"))
        assert "PATH" not in run("harness", "env", "codex", "--url", plane.url)


def test_env_of_an_open_session_takes_the_model_of_its_policy(here: Path) -> None:
    keep_key(here / "rolltap-data")
    with stub_plane({**OPENS, "GET /read/sessions/s1": shown("s1", policy="my-model")}) as plane:
        output = run("harness", "env", "codex", "--session", "s1", "--key", "k-1", "--url", plane.url)
    assert "http://127.0.0.1:8710/s/s1" in output
    assert "-m my-model" in output


def test_env_does_not_make_up_a_key() -> None:
    result = CliRunner().invoke(app, ["harness", "env", "codex", "--session", "s1"])
    assert result.exit_code == 1
    assert "--session needs its --key" in result.output


@pytest.mark.parametrize("command", ["harness env {}", "run {} go"])
def test_a_harness_inside_the_runner_is_refused_before_a_session_is_opened(command: str, here: Path) -> None:
    keep_key(here / "rolltap-data")
    words = command.format("mini-swe-agent-inprocess").split()
    with stub_plane(OPENS) as plane:
        result = CliRunner().invoke(app, [*words, "--url", plane.url])
    assert (result.exit_code, plane.requests) == (1, [])
    assert "mini-swe-agent-inprocess runs inside the runner" in result.output


def test_env_does_not_drop_a_key_without_its_session(here: Path) -> None:
    keep_key(here / "rolltap-data")
    with stub_plane(OPENS) as plane:
        result = CliRunner().invoke(app, ["harness", "env", "codex", "--key", "WRONG", "--url", plane.url])
    assert (result.exit_code, plane.requests) == (1, [])
    assert "--key needs its --session" in result.output


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("127.0.0.1:8712", "write http://127.0.0.1:8712"),
        ("foo", "write http://HOST:PORT, as http://127.0.0.1:8712"),
        ("http://[::1", "write http://HOST:PORT"),
        ("http://host:port", "write http://HOST:PORT"),
        ("ftp://host", "write http://HOST:PORT"),
        (" ", "write http://HOST:PORT"),
    ],
)
@pytest.mark.parametrize("command", ["sessions list", "keys list", "view --no-browser", "node --until-idle"])
def test_what_is_no_url_is_said_before_any_try(
    command: str, url: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLTAP_ADMIN_KEY", "k")
    monkeypatch.setenv("ROLLTAP_RUNNER_KEY", "k")
    result = CliRunner().invoke(app, [*command.split(), "--url", url])
    assert result.exit_code == 1
    assert result.output.startswith(f"rolltap: --url: {url!r} is not an http(s) URL; {written}")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("key", ["k\nk", "k\tk", "k\x01", "\u20ac", "k\u2028k"])
@pytest.mark.parametrize("command", ["sessions list", "keys list", "node --until-idle"])
def test_what_no_request_can_carry_as_a_key_is_said_before_any_try(
    command: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLTAP_ADMIN_KEY", key)
    monkeypatch.setenv("ROLLTAP_RUNNER_KEY", key)
    result = CliRunner().invoke(app, [*command.split(), "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.output.startswith("rolltap: the key for http://127.0.0.1:1 holds a line break or another character")
    assert result.output.count("\n") == 1


def test_a_key_with_the_line_break_of_its_file_is_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_plane(LIST) as plane:
        monkeypatch.setenv("ROLLTAP_ADMIN_KEY", " rt-admin\n")
        run("sessions", "list", "--url", plane.url)
    assert plane.requests == [("GET /read/sessions?limit=100", "Bearer rt-admin")]
