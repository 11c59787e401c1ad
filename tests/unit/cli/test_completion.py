"""What a shell offers behind a half-typed command, asked for as bash asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.main import app


def offered(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash is offered for the last word of `line`, in a folder whose settings name two policies."""
    monkeypatch.chdir(folder)
    policy = 'engine = "main"\nmodel = "m"\ntokenizer = "t"'
    (folder / "rolltap.toml").write_text(
        f'[engines.main]\nurl = "http://127.0.0.1:1"\n[policies.tiny]\n{policy}\n[policies.other]\n{policy}\n'
    )
    words = line.split(" ")
    asked = {"_ROLLTAP_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(app, [], prog_name="rolltap", env=asked)
    return result.output.split()


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("rolltap run co", ["codex", "copilot-cli", "command"]),
        ("rolltap run codex --policy ", ["tiny", "other"]),
        ("rolltap run codex --policy ti", ["tiny"]),
        ("rolltap run tasks.jsonl --harness open", ["opencode", "openclaw", "openhands", "openai-agents"]),
        ("rolltap run tasks.jsonl --runtime b", ["bubblewrap"]),
        ("rolltap node --runtime a", ["auto", "apptainer"]),
        ("rolltap harness env codex --policy o", ["other"]),
    ],
)
def test_values_are_completed(line: str, values: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(line, tmp_path, monkeypatch) == values
