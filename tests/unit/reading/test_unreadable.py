"""A reply or a request that can't be read is shown as what it is, and keeps no page from the rest."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rolltap.calllog import sessions as stored_sessions
from rolltap.calllog.codec import MOST_COUNTED, checksum
from rolltap.calllog.facts import RequestParts
from rolltap.calllog.notes import append_note
from rolltap.calllog.outlines import CallOutline
from rolltap.calllog.schema import call_completions, call_intents, notes, sessions
from rolltap.calllog.sql import open_call_log
from rolltap.contract.admin import HarnessLog, LogEntry, NewNote, Note, NoteKind
from rolltap.errors import RecordTooLarge
from rolltap.proxy.reading_process.questions import SessionEnds
from rolltap.proxy.viewer.listing import address_of
from rolltap.proxy.viewer.pages import Pages
from rolltap.reading import decoded
from rolltap.reading.decoded import parse_request, preview, refused_view, reply_view
from rolltap.reading.indexing import summary_of
from rolltap.reading.reader import opened_reader
from rolltap.reading.types import SessionQuery, SessionSummary
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.types import LogVerdict, Trajectory

from ..calllog.facts import a_completion, a_session, an_intent

DEEP = b'{"role":"assistant","content":' + b"[" * 50_000 + b"]" * 50_000 + b"}"


@pytest.mark.parametrize("packed", [b"null", b"[]", b"\xff\xfe", b'{"role":5}', b'"x"', b"1e999", DEEP])
def test_a_reply_that_can_not_be_read_is_text(packed: bytes) -> None:
    shown = reply_view(packed)
    assert shown is not None
    assert shown.parts[0].text == packed.decode("utf-8", "replace")
    assert preview(packed) == (packed.decode("utf-8", "replace")[:200], ())


@pytest.mark.parametrize("head", [b"null", b"[]", b"\xff\xfe", b'"x"', b"1e999", DEEP, b"[" * 50_000])
def test_a_request_that_can_not_be_read_has_no_messages(head: bytes) -> None:
    request = RequestParts(head, (b'{"role":"user","content":"x"}',))
    assert parse_request("openai_chat", request) is None
    assert refused_view(request) is None


OWNERS = {sessions: "id", call_intents: "session_id", call_completions: "call_id", notes: "session_id"}
"""The tables of a session's rows, and the column that says of which session or call a row is."""
VALUES: tuple[Any, ...] = (
    *("x", "", "a\0b", '["', '{"a":{"b":1}}', "[" * 50_000, '"\\ud800"', '{"a":"\\ud800"}'),
    *(b"\xff\xfe", b"\x01\xff", 0, -1, 2**62, -(2**62), 1e308, float("inf")),
)


async def recorded(store: Path, count: int) -> list[tuple[str, str]]:
    """The ids of `count` new sessions and of the call in each."""
    log = open_call_log(f"sqlite:///{store}")
    await log.start()
    made: list[tuple[str, str]] = []
    for _ in range(count):
        session = a_session(rollout_id=None)
        await log.open_session(session)
        intent = an_intent(session)
        await log.append_intent(intent)
        await log.append_completion(a_completion(intent.id))
        await append_note(log.database, NewNote("score", "good", 0.5, session_id=session.id))
        made.append((session.id, intent.id))
    await log.close()
    return made


def damage(store: Path, changes: Iterator[tuple[sa.Table, str, str, Any]]) -> None:
    """Sets (table, owner, column, value) behind the triggers' back."""
    with closing(sqlite3.connect(store)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f'DROP TRIGGER "{name}"')
        for table, owner, column, value in changes:
            statement = f"UPDATE {table.name} SET {column} = ? WHERE {OWNERS[table]} = ?"
            with suppress(sqlite3.IntegrityError):
                connection.execute(statement, (value, owner))
        connection.commit()


async def listed(store: Path) -> dict[str, SessionSummary]:
    """The sessions of the list by id, once every view of it has been made."""
    async with opened_reader(f"sqlite:///{store}") as reader:
        await reader.settle(texts=True)
        page = await reader.sessions(SessionQuery(limit=1000))
        assert (await reader.sessions(SessionQuery(search="nothing", limit=1000))).total == 0
        await reader.facets(SessionQuery())
        pages = Pages(reader, "store", standalone=True)
        for sort in ("created_at", "calls", "output_tokens"):
            await pages.sessions(address_of("", "", sort))
        await pages.facets(address_of("", "", "created_at"))
        await pages.runs()
        return {session.id: session for session in page.sessions}


@pytest.mark.parametrize("table", OWNERS, ids=lambda table: table.name)
async def test_a_row_that_can_not_be_read_keeps_no_list_from_the_others(table: sa.Table, tmp_path: Path) -> None:
    """SQLite takes any value in any column."""
    cases = [(column.name, value) for column in table.columns for value in VALUES]
    (good, _), *bad = await recorded(tmp_path / "store.db", 1 + len(cases))
    of_call = OWNERS[table] == "call_id"
    damage(
        tmp_path / "store.db",
        (
            (table, call_id if of_call else session_id, column, value)
            for (session_id, call_id), (column, value) in zip(bad, cases, strict=True)
        ),
    )
    assert good in await listed(tmp_path / "store.db")


async def test_a_session_that_is_too_large_ends_with_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent made it so: the end of its rollout is no failure of the infrastructure."""
    ((session_id, call_id),) = await recorded(tmp_path / "store.db", 1)
    monkeypatch.setattr(stored_sessions, "MOST_PROMPT_TOKENS", 4)
    log = open_call_log(f"sqlite:///{tmp_path / 'store.db'}", writable=False)
    await log.start()

    async def trajectories(session_ids: Sequence[str], policy: str = "", /) -> list[Trajectory]:
        return [reconstruct(calls) for _, calls in (await log.calls(session_ids)).values()]

    ends = SessionEnds(log, trajectories)
    for has_cap in (False, True):
        closed = await ends.ended(session_id, has_cap, [])
        assert [finding.name for finding in closed.findings] == ["record_too_large"]
        assert closed.answered
    check = await ends.compared(session_id, HarnessLog([LogEntry("assistant", call_id)]))
    assert (check.verdict, "over 4 tokens" in check.text) == (LogVerdict.NONE, True)
    await log.close()
    assert session_id in await listed(tmp_path / "store.db")


async def test_a_transcript_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has a text once that is in very many conversations of a session; its transcript would have all."""
    ((session_id, _),) = await recorded(tmp_path / "store.db", 1)
    log = open_call_log(f"sqlite:///{tmp_path / 'store.db'}")
    await log.start()
    request = RequestParts(b'{"model":"m"}', (b'{"role":"user","content":"%s"}' % (b"x" * 100_000),))
    for _ in range(4):
        await log.append_intent(an_intent(session_id, request=request))
    await log.close()
    async with opened_reader(f"sqlite:///{tmp_path / 'store.db'}") as reader:
        monkeypatch.setattr(decoded, "MOST_TEXT", 401_000)
        assert len(await reader.transcript(session_id)) == 5
        monkeypatch.setattr(decoded, "MOST_TEXT", 399_000)
        with pytest.raises(RecordTooLarge, match="over 399,000 characters"):
            await reader.transcript(session_id)


NUMBERS = (10**30, 2**63, -(2**63) - 1, -1, 2**53)


@pytest.mark.parametrize("number", NUMBERS)
async def test_a_number_that_no_call_has_is_capped_or_unknown(number: int, tmp_path: Path) -> None:
    """An upstream counts and names versions as it likes, and so does who writes an archive."""
    (good, _), (odd, call_id) = await recorded(tmp_path / "store.db", 2)
    empty = dict.fromkeys(("output_ids", "logprobs"), b"")
    detail = {"usage": {"prompt": number, "output": number}, "versions": [[number, 0, 0]]}
    damage(tmp_path / "store.db", ((call_intents, odd, column, b"") for column in ("new_ids", "lineage")))
    damage(
        tmp_path / "store.db",
        ((call_completions, call_id, *change) for change in {**empty, "detail": json.dumps(detail)}.items()),
    )
    reseal(tmp_path / "store.db", odd)
    shown = await listed(tmp_path / "store.db")
    assert good in shown
    assert shown[odd].prompt_tokens == shown[odd].output_tokens == max(0, min(number, MOST_COUNTED))
    assert shown[odd].newest_version is None
    async with opened_reader(f"sqlite:///{tmp_path / 'store.db'}") as reader:
        assert (await reader.session(odd)).calls[0].prompt_tokens == shown[odd].prompt_tokens
        assert not (await reader.trajectory(odd)).segments


def reseal(store: Path, session_id: str) -> None:
    """Gives the rows of a session's call the checksums that they should have."""
    with closing(sqlite3.connect(store)) as connection:
        for table, owner, at in (
            (call_intents, "session_id = ?", 10),
            (call_completions, "call_id IN (SELECT id FROM call_intents WHERE session_id = ?)", 6),
        ):
            row = connection.execute(f"SELECT * FROM {table.name} WHERE {owner}", (session_id,)).fetchone()
            typed = [
                bool(value) if isinstance(column.type, sa.Boolean) else value
                for column, value in zip(table.columns, row, strict=True)
            ]
            crc = checksum(tuple(typed[:at]), tuple(typed[at + 1 :]))
            connection.execute(f"UPDATE {table.name} SET crc = ? WHERE {owner}", (crc, session_id))
        connection.commit()


def test_a_session_has_a_largest_size_in_a_list() -> None:
    """Calls and notes may bring any number of names: 50,000 labels of an archive of 100 kB made a list of 60 MB."""
    session, many = a_session(tags={"own": "tag"}), 3000
    values: list[tuple[NoteKind, Any]] = [("score", 1.5), ("label", "v" * 60_000), ("tag", "v" * 60_000)]
    added = [
        Note(f"n{at}", session.id, None, kind, f"{at}" + "n" * 250, value, author="me", created_at=5.0)
        for at in range(many)
        for kind, value in values
    ]
    calls = [
        CallOutline(
            f"c{at}", session.id, None, 5.0, "", f"{at}" + "d" * 8000, f"{at}" + "m" * 8000, "", False,
            1, 1, 6.0, "completed", None, "", None, None,
        )
        for at in range(many)
    ]  # fmt: skip
    summary, _ = summary_of(session, calls, None, added)
    assert len(msgspec.json.encode(summary)) < 1 << 20
    assert summary.tags["own"] == "tag"
    assert list(summary.scores)[-1].startswith(f"{many - 1}n")
    assert summary.labels[-1].startswith(f"{many - 1}n")
