"""`rolltap sessions` by the beginning of an id, values that a shell completes, and where `serve` listens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolltap.cli.common import complete_format, complete_harness, complete_policy, complete_session
from rolltap.cli.main import app
from rolltap.cli.serve import listening
from rolltap.contract.admin import SessionKey
from rolltap.settings import Settings

from .plane import StubPlane, call_line, served, shown, stub_plane, summary

IDS = ("01ab0000000000000000", "01ac0000000000000000", "01ac1111111111111111")


def replies(*ids: str) -> dict[str, object]:
    page = {"sessions": [summary(id) for id in ids], "total": len(ids), "indexed": 1.0}
    return {
        "GET /read/sessions?limit=100": page,
        "GET /read/sessions?limit=1000": page,
        **{f"GET /read/sessions/{id}": shown(id) for id in ids},
        "GET /policies": {"policies": [served("solver"), served("critic")]},
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLTAP_ADMIN_KEY", "k")
    return tmp_path


def show(plane: StubPlane, session: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sessions", "show", session, "--url", plane.url])
    return result.exit_code, result.output


@pytest.mark.usefixtures("here")
def test_the_list_shows_tampering_and_a_log_that_differs_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    honest = {
        "policy": "default",
        "harness": "claude-code",
        "tags": {"harness": "claude-code", "a": "b"},
        "closed_at": 1.0,
        "calls": 1234,
        "breaks": 2,
        "task_id": None,
        "opening": "",
    }
    honest |= {"output_tokens": 123456, "reward": None, "tampering": 0, "log_check": "match"}
    odd = {**honest, "reward": 0.5, "tampering": 12, "log_check": "mismatch", "opening": "Fix the parser's tests now"}
    odd["task_id"] = "t1"
    page = {"sessions": [summary(IDS[0], **honest), summary(IDS[1], **odd)], "total": 9, "indexed": 0.5}
    query = "search=fix+it&where=calls%3E%3D2&where=reward%3C1&limit=2"
    chosen = ("fix it", "--limit", "2", "--where", "calls>=2", "--where", "reward<1")
    with stub_plane({f"GET /read/sessions?{query}": page}) as plane:
        text = CliRunner().invoke(app, ["sessions", "list", *chosen, "--url", plane.url]).output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert [row[0] for row in rows if row[0].startswith("01")] == list(IDS[:2]), text
    assert {row[2] for row in rows} == {"default", "claude-code", "task t1", "a=b"}, text
    assert len(rows[0]) == 6, text
    assert "calls ┃ sampled" in text
    assert {tuple(row[3:5]) for row in rows if row[0].startswith("01")} == {("1234", "123456")}
    states = " ".join(row[5] for row in rows).split()
    assert states == ["closed", "closed", "reward", "0.5", "tampering", "12", "log", "differs"]
    assert "2 of 9" in text
    assert "this search is not complete, 50% so far" in text
    assert "│ Fix the parser's     │" in text, "the first words stand below the id"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("words", "line"), [((), "no session yet: "), (("gone",), "no session matches")])
def test_an_empty_list_says_what_would_fill_it(words: tuple[str, ...], line: str) -> None:
    page = {"sessions": [], "total": 0, "indexed": 1.0}
    paths = ("GET /read/sessions?limit=100", "GET /read/sessions?search=gone&limit=100")
    with stub_plane(dict.fromkeys(paths, page)) as plane:
        result = CliRunner().invoke(app, ["sessions", "list", *words, "--url", plane.url])
    assert result.output.startswith(line), result.output


@pytest.mark.usefixtures("here")
def test_a_wide_screen_has_the_columns_of_the_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    row = {"policy": "default", "harness": "codex", "tags": {"harness": "codex", "a": "b"}, "task_id": "parser-1"}
    row |= {"created_at": time.time() - 300, "closed_at": None, "calls": 3, "output_tokens": 36, "breaks": 0}
    row |= {"tampering": 0, "log_check": "match", "opening": "Fix the \x1b[2Jfailing parser test"}
    rows = [summary(IDS[0], **row, reward=0.5), summary(IDS[1], **row, reward=None)]
    with stub_plane({"GET /read/sessions?limit=100": {"sessions": rows, "total": 2, "indexed": 1}}) as plane:
        text = CliRunner().invoke(app, ["sessions", "list", "--url", plane.url]).output
    assert "Fix the ␛[2Jfailing" in text
    assert "codex · task parser-1 · a=b" in text
    assert "██▌   0.50" in text
    assert "5 min ago" in text
    assert "closed" not in text


@pytest.mark.usefixtures("here")
def test_the_list_has_day_and_time_in_one_line_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    row = {"policy": "a-policy-with-quite-a-long-name", "harness": "claude-code", "tags": {"batch": "of-the-morning"}}
    row |= {
        "opening": "",
        "created_at": 0.0,
        "closed_at": None,
        "calls": 1234,
        "output_tokens": 123456,
        "reward": 0.5,
        "tampering": 1,
    }
    page = {"sessions": [summary(IDS[0], **row, log_check="mismatch")], "total": 1, "indexed": 1}
    began = time.strftime("%m-%d %H:%M", time.localtime(0.0))
    with stub_plane({"GET /read/sessions?limit=100": page}) as plane:
        text = CliRunner().invoke(app, ["sessions", "list", "--url", plane.url]).output
    assert f"│ {began} │" in text, text
    assert IDS[0] in text


@pytest.mark.usefixtures("here")
def test_a_finding_that_no_call_shows_has_no_count() -> None:
    finding = {"name": "no_reply", "grade": "fatal", "count": 0, "text": "no call of the agent was answered"}
    cut = {"name": "turns_truncated", "grade": "warn", "count": 2, "text": "replies were cut off"}
    closed = {"session_id": IDS[0], "capped": False, "answered": False, "findings": [finding, cut]}
    with stub_plane({f"POST /sessions/{IDS[0]}/close": closed}) as plane:
        output = CliRunner().invoke(app, ["sessions", "close", IDS[0], "--url", plane.url]).output
    assert output.splitlines()[1:] == [
        "FATAL: no call of the agent was answered (no_reply)",
        "WARN: 2 replies were cut off (turns_truncated)",
    ]


@pytest.mark.usefixtures("here")
def test_a_refused_call_says_why() -> None:
    answers = replies(IDS[0])
    error = "not_found: the model 'gpt-4o' is not served here"
    refused = call_line(IDS[1], kind="auxiliary", outcome="refused", error=error)
    answers[f"GET /read/sessions/{IDS[0]}"]["calls"] = [refused]  # type: ignore[index]
    with stub_plane(answers) as plane:
        status, output = show(plane, IDS[0])
    assert status == 0
    assert "refused: 0 + 0 tokens not_found: the model 'gpt-4o' is not served here" in " ".join(output.split())


@pytest.mark.usefixtures("here")
def test_an_opened_session_of_a_vendor_has_its_key_in_the_url_and_leaves_the_users_own() -> None:
    opened = SessionKey("s1", "rt-k", "http://here:8710/s/s1", 0.0, "openai")
    answers: dict[str, object] = {"POST /sessions": asdict(opened)}
    answers["GET /policies/openai"] = served("openai", relayed=("openai_chat", "openai_responses"))
    with stub_plane(answers) as plane:
        output = CliRunner().invoke(app, ["sessions", "open", "--url", plane.url]).output
    assert output.splitlines() == [
        "# session s1; its key, in the URL, is shown only now",
        "export OPENAI_BASE_URL=http://here:8710/s/rt-k/v1  # keep your own OPENAI_API_KEY",
        "# codex -c openai_base_url=http://here:8710/s/rt-k/v1",
    ]
    answers["GET /policies/openai"] = served("openai", relayed=("anthropic",))
    with stub_plane(answers) as plane:
        output = CliRunner().invoke(app, ["sessions", "open", "--url", plane.url]).output
    assert output.splitlines()[1:] == [
        "export ANTHROPIC_BASE_URL=http://here:8710/s/rt-k  # keep your own ANTHROPIC_API_KEY"
    ]


@pytest.mark.usefixtures("here")
def test_every_call_of_a_long_session_is_shown_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answers = replies(IDS[0])
    tree = {0: None, **{at: at - 1 for at in range(1, 40)}, 40: 5, 41: 40}  # 40 calls in a line, and a branch of two
    tree |= {at: at - 1 - at % 2 for at in range(42, 100)}  # then each call is retried: branches of branches
    named = {at: f"{at:020d}" for at in tree} | {None: None}
    facts = {"kind": "agent", "outcome": "completed", "prompt_tokens": 1, "output_tokens": 1}
    calls = [call_line(f"{at:020d}", parent_id=named[parent], **facts) for at, parent in tree.items()]
    answers[f"GET /read/sessions/{IDS[0]}"]["calls"] = calls  # type: ignore[index]
    with stub_plane(answers) as plane:
        lines = [line for line in show(plane, IDS[0])[1].splitlines() if " agent completed" in line]
    shown = {int(line.split(" agent ")[0][-6:]): line for line in lines}
    assert sorted(shown) == sorted(tree)
    indents = {at: line.index(" agent ") for at, line in shown.items()}
    assert {indents[at] for at in range(6)} == {indents[0]}
    assert indents[6] == indents[40] == indents[5] + 4
    assert "branches off 000005" in shown[40]
    assert "branches off" not in shown[5]


@pytest.mark.usefixtures("here")
def test_a_session_is_named_by_what_only_its_id_begins_with() -> None:
    with stub_plane(replies(*IDS)) as plane:
        assert IDS[0] in show(plane, "01ab")[1]
        assert f"session {IDS[1]} (policy p)" in show(plane, IDS[1])[1]
        code, told = show(plane, "01ac")
        assert code == 1
        assert all(id in told for id in IDS[1:])
        assert IDS[0] not in told
        assert show(plane, "zz")[0] == 1
    many = [f"{number:020d}" for number in range(20)]
    with stub_plane(replies(*many)) as plane:
        assert "and 12 more" in show(plane, "0")[1].replace("\n", " ")


def test_values_are_completed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_plane(replies(*IDS)) as plane:
        monkeypatch.setenv("ROLLTAP_ADMIN_URL", plane.url)
        assert complete_session("01ac") == list(IDS[1:])
        assert complete_policy("so") == ["solver"]
    assert complete_session("01") == [], "no server"
    assert complete_harness("code") == ["codex"]
    assert "sft" in complete_format("s")
    (here / "rolltap.toml").write_text('[engines.e]\nurl = "http://127.0.0.1:9"\n[policies.own]\nengine = "e"\n')
    assert complete_policy("") == ["own"]


def test_a_shell_gets_them() -> None:
    asked = {"_ROLLTAP_COMPLETE": "complete_bash", "COMP_WORDS": "rolltap harness show code", "COMP_CWORD": "3"}
    rolltap = Path(sys.executable).with_name("rolltap")
    done = subprocess.run([rolltap], env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout.split() == ["codex"], done.stderr


def test_the_command_line_says_where_planes_listen() -> None:
    named = {"host": None, "agent_port": 0, "trainer_port": 9001, "admin_port": None}
    listen = listening(Settings(), named).listen
    assert (listen.host, listen.agent_port, listen.trainer_port, listen.admin_port) == ("127.0.0.1", 0, 9001, 8712)
