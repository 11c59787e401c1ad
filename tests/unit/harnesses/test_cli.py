"""`rolltap harness` as a person sees it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rolltap.cli.common import PROXIES, past_proxies
from rolltap.cli.harness import app, comment
from rolltap.cli.sessions import exports, relayed_exports
from rolltap.contract.admin import SessionKey
from rolltap.harnesses.agents.registry import get_harness, harness_names
from rolltap.harnesses.base import Command, Interactive
from rolltap.harnesses.runner.specs import SAMPLE_JOB, launch_type

from ..cli.plane import served, shown, stub_plane


def output(*words: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160", **(env or {})})
    assert result.exit_code == code, result.output
    return result.output


def test_the_list_names_every_harness_with_its_tested_release() -> None:
    told, package = output("list"), get_harness("codex").package
    assert package
    assert re.search(rf"^codex +openai_responses +{re.escape(package.version)} ", told, re.MULTILINE)
    assert told.count("\n") > 20


def test_show_prints_the_launch_and_the_quirks() -> None:
    told = output("show", "gemini-cli")
    assert "export GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8710/s/SESSION" in told
    assert "gemini --yolo" in told
    assert "Comments in the stream crash it" in told


def test_an_unknown_harness_is_one_line() -> None:
    told = output("show", "codecs", code=1)
    assert "no harness 'codecs'; known:" in told


OPENED: dict[str, Any] = {
    "session_id": "abc",
    "key": "it's a key",
    "base_url": "http://10.0.0.1:1/s/abc",
    "policy": "m",
    "context": 45_000,
    "expires_at": 0,
}
PLANE = {
    "POST /sessions": OPENED,
    "GET /policies": {"policies": [served("m", context=45_000)]},
    "GET /policies/m": served("m"),
    "GET /read/sessions/abc": shown("abc", policy="m"),
}
COMMANDS = [name for name in harness_names() if launch_type(get_harness(name)) is Command]


@dataclass
class Evaluated:
    """What `eval` did in an empty folder with an empty HOME: `environment` afterwards, the programs that were `run`,
    and the files that appeared in either."""

    environment: Mapping[str, str]
    run: str
    files: list[str]


def evaluated(printed: str, folder: Path) -> Evaluated:
    """Every program on PATH is a stub that notes that it was run."""
    for name in ("home", "work", "bin", "tmp"):
        (folder / name).mkdir()
    words = set(re.findall(r"[\w.-]+", printed))
    for word in words | {"cat", "mkdir", "python", "sh", "touch"}:
        stub = folder / "bin" / word
        stub.write_text(f"#!/bin/bash\necho {word} >> {folder}/run\n")
        stub.chmod(0o755)
    script = 'eval "$1"; PATH=; declare -x > "$2"'
    done = subprocess.run(
        ["/bin/bash", "-euc", script, "bash", printed, str(folder / "environment")],
        env={"HOME": str(folder / "home"), "PATH": str(folder / "bin")},
        cwd=folder / "work",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
    declared = re.findall(r'^declare -x (\w+)="((?:[^"\\]|\\.)*)"', (folder / "environment").read_text(), re.M)
    run = folder / "run"
    files = [str(path) for name in ("home", "work") for path in (folder / name).rglob("*")]
    return Evaluated(dict(declared), run.read_text() if run.exists() else "", files)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("known", [False, True])
def test_env_can_be_evaluated_and_only_exports(name: str, known: bool, tmp_path: Path) -> None:
    files = tmp_path / "files"
    words = ["--session", "abc", "--key", "it's a key"] if known else []
    with stub_plane(PLANE) as plane:
        environment = {"ROLLTAP_ADMIN_KEY": "k", "ROLLTAP_AGENT_URL": "http://10.0.0.1:1"}
        told = output("env", name, "--url", plane.url, "--files", str(files), *words, env=environment)
    done = evaluated(told, tmp_path)
    assert (done.run, done.files) == ("", [])
    command = told.splitlines()[-1]
    assert command.startswith("# then: ")
    assert "PROMPT" in command
    written = "".join(path.read_text() for path in files.rglob("*") if path.is_file())
    everything = command + written + " ".join(done.environment.values())
    assert "http://10.0.0.1:1/s/abc" in everything
    assert "it's a key" in everything
    harness = get_harness(name)
    talks = isinstance(harness, Interactive)
    assert [line for line in told.splitlines() if line.startswith("# then, in its own interface: ")] == (
        [told.splitlines()[-2]] if talks else []
    )
    launch = harness.launch(SAMPLE_JOB)
    assert isinstance(launch, Command)
    assert {str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()} == set(launch.files)
    if launch.files:
        assert str(files) in command + " ".join(done.environment.values()), "the harness can find them"
    assert all(path.stat().st_mode & 0o077 == 0 for path in files.rglob("*") if path.is_file())


def test_without_a_folder_the_files_are_in_a_new_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with stub_plane(PLANE) as plane:
        output("env", "pi", "--url", plane.url, env={"ROLLTAP_ADMIN_KEY": "k"})
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / ".pi/agent/models.json").exists()


def test_a_comment_stays_one_whatever_it_holds(tmp_path: Path) -> None:
    assert evaluated(comment("a\nmkdir here\n\nb"), tmp_path).run == ""


@pytest.mark.parametrize("relayed", [[], ["anthropic", "openai_responses"]])
def test_what_sessions_open_prints_can_be_evaluated(relayed: list[str], tmp_path: Path) -> None:
    opened = SessionKey(**OPENED)
    lines = relayed_exports(opened, relayed) if relayed else exports(replace(opened, key="rt-key"))
    done = evaluated("\n".join(lines), tmp_path)
    assert (done.run, done.files) == ("", [])
    assert "http://10.0.0.1:1/s/" in done.environment["ANTHROPIC_BASE_URL"]


def test_env_tells_the_context(tmp_path: Path) -> None:
    with stub_plane(PLANE) as plane:
        told = output("env", "claude-code", "--url", plane.url, env={"ROLLTAP_ADMIN_KEY": "k"})
    assert int(evaluated(told, tmp_path).environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) >= 45_000


@pytest.mark.parametrize(
    ("proxies", "line"),
    [
        ({}, []),
        ({"http_proxy": "http://proxy:3128"}, ["export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1"]),
        (
            {"ALL_PROXY": "socks5://p", "NO_PROXY": "a.org, b"},
            ["export NO_PROXY=127.0.0.1,a.org,b no_proxy=127.0.0.1,a.org,b"],
        ),
        ({"HTTP_PROXY": "http://p", "no_proxy": "localhost,127.0.0.1"}, []),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "*"}, []),
    ],
)
def test_where_the_shell_has_a_proxy_clients_are_led_past_it(
    proxies: dict[str, str], line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*PROXIES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    assert past_proxies("http://127.0.0.1:8710/s/1") == line
    assert past_proxies("https://rolltap.example/s/1") == []
    opened = msgspec.convert({**OPENED, "key": "rt-key", "base_url": "http://127.0.0.1:8710/s/1"}, SessionKey)
    assert [text for text in exports(opened) if "NO_PROXY" in text] == line
    assert [text for text in relayed_exports(opened, ["anthropic"]) if "NO_PROXY" in text] == line
