"""`rolltap harness` as a person sees it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.harness import app

from ..cli.plane import stub_plane


def output(*words: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160", **(env or {})})
    assert result.exit_code == code, result.output
    return result.output


def test_the_list_names_every_harness_with_its_tested_release() -> None:
    told = output("list")
    assert re.search(r"^codex +openai_responses +0\.169\.0 ", told, re.MULTILINE)
    assert told.count("\n") > 20


def test_show_prints_the_launch_and_the_quirks() -> None:
    told = output("show", "gemini-cli")
    assert "export GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8710/s/SESSION" in told
    assert "gemini --yolo" in told
    assert "Comments in the stream crash it" in told


def test_an_unknown_harness_is_one_line() -> None:
    told = output("show", "codecs", code=1)
    assert "no harness 'codecs'; known:" in told


@pytest.mark.parametrize("name", ["codex", "pi", "opencode", "openai-agents", "mistral-vibe"])
def test_env_is_shell_that_can_be_run(name: str, tmp_path: Path) -> None:
    opened = {
        "session_id": "abc",
        "key": "it's a key",
        "base_url": "http://10.0.0.1:1/s/abc",
        "policy": "m",
        "expires_at": 0,
    }
    with stub_plane({"POST /sessions": opened, "GET /policies": {"policies": [{"name": "m", "relayed": []}]}}) as plane:
        told = output("env", name, "--url", plane.url, env={"ROLLTAP_ADMIN_KEY": "k"})
    *exports, command = told.strip().splitlines()
    assert command.split()[0] in ("codex", "pi", "opencode", "python", "vibe")
    script = "\n".join([*exports, "env; cat ~/.pi/agent/models.json ~/.vibe/config.toml 2>/dev/null || true"])
    done = subprocess.run(
        ["bash", "-euc", script], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "http://10.0.0.1:1/s/abc" in done.stdout + command
    assert "it's a key" in done.stdout
