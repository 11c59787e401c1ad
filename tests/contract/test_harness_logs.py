"""What every reader of a harness's own log promises, whatever an agent left in its place."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from rolltap.contract.admin import HarnessLog, LogEntry
from rolltap.extras import known_names
from rolltap.harnesses import left_files
from rolltap.harnesses.logs.check import ENTRY_POINTS, LOG_READERS, read_log
from rolltap.reading.log_check import RecordedReply, compare

from .harness_logs import CALL, FORKS, OPENCODE_FORK, logs_of, write_opencode

NAMES = known_names(LOG_READERS, ENTRY_POINTS)
RECORD = [
    RecordedReply("01m82bxckjqjh7d0j05d", 42, (CALL,), frozenset({"system", "user"}), required=True),
    RecordedReply("01m82bxd3jq07qzan0d3", 16, (), frozenset({"tool"}), required=True),
]


@dataclass
class Left:
    """What is left of a workspace."""

    folder: Path
    home_folder: Path


@pytest.fixture
def left(tmp_path: Path) -> Left:
    for name in ("work", "home"):
        (tmp_path / name).mkdir()
    return Left(tmp_path / "work", tmp_path / "home")


def read(name: str, left: Left) -> HarnessLog:
    log = read_log(name, left.home_folder, left.folder)
    assert log is not None
    return log


def write(name: str, left: Left) -> None:
    if name == "opencode":
        write_opencode(left.home_folder)
    for path, text in logs_of(name).items():
        (left.home_folder / path).parent.mkdir(parents=True, exist_ok=True)
        (left.home_folder / path).write_text(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_log_has_the_main_conversation_in_order(name: str, left: Left) -> None:
    write(name, left)
    log = read(name, left)
    assert log.problem == ""
    assert [entry.role for entry in log.entries] == ["user", "assistant", "tool", "assistant"]
    assert [entry.tokens for entry in log.entries] == [None, 42, None, 16]
    assert CALL in log.entries[1].tool_calls[0]
    assert CALL in log.entries[2].id
    assert compare(log, RECORD).verdict == "match"


@pytest.mark.parametrize("fork", ["0", "z"])
@pytest.mark.parametrize("name", [*FORKS, "opencode"])
def test_a_fork_begins_with_a_copy_whose_replies_count_once(name: str, fork: str, left: Left) -> None:
    write(name, left)
    if name == "opencode":
        (left.home_folder / ".local/share/opencode/opencode.db").unlink()
        (left.home_folder / ".local/share/opencode/opencode.db-wal").unlink()
        write_opencode(left.home_folder, fork=OPENCODE_FORK)
    else:
        path, added = FORKS[name]
        log = left.home_folder / path
        (log.parent / f"{fork}.jsonl").write_text(log.read_text() + added)
    entries = read(name, left).entries
    assert [entry.tokens for entry in entries if entry.role == "assistant"] == [42, 16, 7]
    assert [entry.role for entry in entries] == ["user", "assistant", "tool", "assistant", "user", "assistant"]


@pytest.mark.parametrize("name", NAMES)
def test_no_log_is_a_problem_that_is_said(name: str, left: Left) -> None:
    assert read(name, left).problem == "the harness left no log"


@pytest.mark.parametrize("name", NAMES)
def test_links_are_not_followed(name: str, left: Left, tmp_path: Path) -> None:
    write(name, left)
    elsewhere = tmp_path / "elsewhere"
    left.home_folder.rename(elsewhere)
    left.home_folder.mkdir()
    for entry in elsewhere.iterdir():
        (left.home_folder / entry.name).symlink_to(entry)
    assert read(name, left).problem
    left.home_folder.rename(tmp_path / "links")
    left.home_folder.symlink_to(elsewhere)
    assert read(name, left).problem, "HOME itself is a link"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_too_large_is_not_read(name: str, left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    write(name, left)
    monkeypatch.setattr(left_files, "MAX_BYTES", 64)
    assert "more than" in read(name, left).problem


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strange", [None, 3, "x" * 300, [3], {"a": 1}, "\udcff"], ids=repr)
def test_values_of_other_kinds_raise_nothing(name: str, strange: Any, left: Left) -> None:
    for path, text in logs_of(name).items():
        target = left.home_folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        mutations = [_mutations(json.loads(line), strange) for line in text.splitlines()]
        for lines in zip_longest(*mutations):  # a change in every line at once
            target.write_text("".join(json.dumps(line) + "\n" for line in lines))
            compare(read(name, left), RECORD)


def _mutations(value: Any, strange: Any) -> list[Any]:
    """The value with each of its parts replaced, one at a time."""
    if isinstance(value, dict):
        return [strange, *({**value, key: new} for key in value for new in _mutations(value[key], strange))]
    if isinstance(value, list):
        parts = [(at, new) for at in range(len(value)) for new in _mutations(value[at], strange)]
        return [strange, *([*value[:at], new, *value[at + 1 :]] for at, new in parts)]
    return [strange]


RUNNING = {
    "view without an end": "CREATE VIEW message AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) "
    "SELECT id, 's' session_id, 1 time_created, '{}' data FROM n;",
    "view": "CREATE TABLE kept (data text); CREATE VIEW message AS "
    "SELECT 'm' id, 's' session_id, 1 time_created, data FROM kept;",
    "computed column": "CREATE TABLE message (id text, session_id text, time_created integer, "
    "data text AS (hex(zeroblob(9000000)))); INSERT INTO message (id, session_id, time_created) VALUES ('m', 's', 1);",
    "virtual table": "CREATE VIRTUAL TABLE message USING fts5(id, session_id, time_created, data);",
}


@pytest.mark.parametrize("name", RUNNING)
def test_a_database_that_would_run_sql_of_its_own_is_refused(left: Left, name: str) -> None:
    folder = left.home_folder / ".local/share/opencode"
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "opencode.db")) as database, database:
        database.executescript(
            "CREATE TABLE session (id text, parent_id text); CREATE TABLE part (id text, message_id text, data text);"
            f"{RUNNING[name]} INSERT INTO session VALUES ('s', NULL)"
        )
    assert "no table of stored values" in read("opencode", left).problem


def test_the_results_of_a_subagents_session_are_left_out(left: Left) -> None:
    write_opencode(left.home_folder, parent="another")
    assert read("opencode", left).problem == "the harness left no log"


def test_a_line_that_was_cut_off_ends_a_log(left: Left) -> None:
    write("pi", left)
    (path,) = left.home_folder.glob(".pi/agent/sessions/*/*.jsonl")
    path.write_text(path.read_text()[:-30])
    log = read("pi", left)
    assert [entry.role for entry in log.entries] == ["user", "assistant", "tool"]
    path.write_text(path.read_text().replace('"toolResult"', "{", 1))
    assert "not JSON" in read("pi", left).problem


def test_entries_are_bounded(left: Left) -> None:
    steps = [{"source": "agent"}] * 100_001
    (left.home_folder / "trajectory.json").write_text(json.dumps({"schema_version": "ATIF-v1.5", "steps": steps}))
    assert "more than 100000 entries" in read("command", left).problem


def test_all_files_of_a_log_are_bounded_together(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    write("pi", left)
    (path,) = left.home_folder.glob(".pi/agent/sessions/*/*.jsonl")
    monkeypatch.setattr(left_files, "MAX_BYTES", 3 * path.stat().st_size)
    for name in ("second", "third"):
        (path.parent / f"{name}.jsonl").hardlink_to(path)
    assert read("pi", left).problem == ""
    (path.parent / "another.jsonl").hardlink_to(path)
    assert "the log has more than" in read("pi", left).problem


def test_a_log_that_the_server_would_not_take_is_not_sent(left: Left) -> None:
    steps = [{"source": "agent", "tool_calls": [{"tool_call_id": "x" * 256}] * 1024}] * 50
    (left.home_folder / "trajectory.json").write_text(json.dumps({"schema_version": "ATIF-v1.5", "steps": steps}))
    assert "ids have more than 1 MB" in read("command", left).problem
    assert LogEntry("assistant") == LogEntry("assistant", "", None, ())
