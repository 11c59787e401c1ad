"""A log."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from rolltap.contract.admin import LogEntry
from rolltap.errors import LogUnreadable
from rolltap.harnesses.logs.base import RunFolders, count, mapping, text
from rolltap.harnesses.logs.files import LeftFiles

DATABASE_FOLDER = ".local/share/opencode"
DATABASE = "opencode.db"
BESIDE = "-wal"
"""The write-ahead log: data that is not in the database's own file yet."""

STEPS = 20_000_000
"""The most steps of SQLite's machine per query: an agent may have made the database."""

TABLES = ("session", "message", "part")
STORED = "SELECT name FROM sqlite_schema WHERE type = 'table' AND rootpage > 0"
"""The ordinary tables; a virtual table has no page of its own."""
VALUE_BYTES = 16 << 20
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
"""What the query does."""

MESSAGES = """
    SELECT message.id, message.data, part.data FROM message JOIN session ON session.id = message.session_id
    LEFT JOIN part ON part.message_id = message.id
    WHERE session.parent_id IS NULL ORDER BY message.time_created, message.id, part.id LIMIT 200000
"""
ENDED = ("completed", "error")


def read_opencode(run_folders: RunFolders) -> list[LogEntry]:
    """OpenCode: the tables `session`, `message` and `part` of `~/.local/share/opencode/opencode.db` (SQLite).

    A tool's result is in the part of its call. The answer's tokens and its reasoning's tokens are counted
    separately; they are 0 until the reply and its tools have ended.
    """
    if not run_folders.home.has(f"{DATABASE_FOLDER}/{DATABASE}"):
        return []
    try:
        return list(_opencode_entries(_rows(run_folders.home)))
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise LogUnreadable(f"{DATABASE_FOLDER}/{DATABASE}: {error}") from error


def _rows(home: LeftFiles) -> list[tuple[str, str, str | None]]:
    """Each message with each of its parts. SQLite opens a copy in a folder with nothing else but its own log.

    Views, virtual tables and computed columns are refused: they would run SQL that an agent wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / DATABASE
        for suffix in ("", BESIDE):
            if home.has(f"{DATABASE_FOLDER}/{DATABASE}{suffix}"):
                copy.with_name(DATABASE + suffix).write_bytes(home.read(f"{DATABASE_FOLDER}/{DATABASE}{suffix}"))
        with closing(sqlite3.connect(copy)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            budget = iter(range(STEPS // 10_000))
            database.set_progress_handler(lambda: next(budget, None) is None, 10_000)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
            columns = [column for table in TABLES for column in database.execute(f"PRAGMA table_xinfo({table})")]
            stored = {name for (name,) in database.execute(STORED)}
            if not stored.issuperset(TABLES) or any(column[6] for column in columns):
                raise LogUnreadable(
                    f"{DATABASE_FOLDER}/{DATABASE}: one of {', '.join(TABLES)} is no table of stored values"
                )
            database.set_authorizer(_authorize)
            return database.execute(MESSAGES).fetchall()


def _authorize(action: int, table: str | None, _column: str | None, _base: str | None, view: str | None) -> int:
    plain = action in ALLOWED and view is None and (action == sqlite3.SQLITE_SELECT or table in TABLES)
    return sqlite3.SQLITE_OK if plain else sqlite3.SQLITE_DENY


def _opencode_entries(rows: list[tuple[str, str, str | None]]) -> Iterator[LogEntry]:
    by_message: dict[str, tuple[str, list[str]]] = {}
    for id, packed, part in rows:
        by_message.setdefault(id, (packed, []))[1].extend([part] if part is not None else [])
    for packed, parts in by_message.values():
        message = mapping(msgspec.json.decode(packed))
        if message.get("role") == "user":
            yield LogEntry("user")
        if message.get("role") != "assistant":
            continue
        decoded = [mapping(msgspec.json.decode(one)) for one in parts]
        tools = [part for part in decoded if part.get("type") == "tool"]
        tokens = mapping(message.get("tokens"))
        output, reasoning = count(tokens.get("output")), count(tokens.get("reasoning"))
        total = (output or 0) + (reasoning or 0)
        said = any(text(part.get("text")) for part in decoded if part.get("type") in ("text", "reasoning"))
        if not total and not tools and not said:  # a call that failed
            continue
        yield LogEntry("assistant", "", total or None, tuple(text(tool.get("callID")) for tool in tools))
        for tool in tools:
            if mapping(tool.get("state")).get("status") in ENDED:
                yield LogEntry("tool", text(tool.get("callID")))
