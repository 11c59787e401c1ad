"""Sessions move between stores by file, loss-free; a bad file changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from rolltap.calllog.archive import ArchiveWriter, export_sessions, import_sessions, read_archive
from rolltap.calllog.codec import completion_row, intent_row
from rolltap.calllog.facts import RequestParts, same_fact
from rolltap.calllog.notes import notes_of
from rolltap.calllog.open import open_call_log
from rolltap.calllog.outlines import fetch_summarized
from rolltap.calllog.schema import call_completions, call_intents, deliveries, notes, parts, prunings, sessions
from rolltap.calllog.sql import SqlCallLog
from rolltap.contract.rules import MaskRule, MessageRule, SessionRules
from rolltap.errors import ConfigError, NotFound, RecordCorrupt
from rolltap.types import Break, BreakReason, Flaw, InjectedMessage, LogCheck, LogVerdict, VersionSpan

from .facts import a_completion, a_session, an_intent, append, ids

TABLES = (sessions, call_intents, call_completions, deliveries, prunings)
LARGE = b'{"text": "%s"}' % (b"large " * 400)


async def opened(url: str) -> SqlCallLog:
    log = open_call_log(url)
    await log.start()
    return log


async def contents(log: SqlCallLog) -> dict[str, list[Any]]:
    """Every row of every table but when a part was last seen."""

    def read(connection: sa.Connection) -> dict[str, list[Any]]:
        queries = {table.name: sa.select(table) for table in TABLES}
        queries["parts"] = sa.select(parts.c.hash, parts.c.data)
        return {name: sorted(map(tuple, connection.execute(query)), key=repr) for name, query in queries.items()}

    return await log.database.query(read)


async def fill(log: SqlCallLog) -> None:
    """Sessions of every kind: closed, open, without calls; calls with all there is, open, presumed aborted."""
    rules = SessionRules((MessageRule(text="a hint " * 2000, call=1),), (MaskRule(pattern="x+"),))
    rich, plain, empty = a_session(tags=rules.tags()), a_session(rollout_id=None, tags={}), a_session()
    for session in (rich, plain, empty):
        await log.open_session(session)
    request = RequestParts(b'{"model":"m"}', (LARGE, b"{}"), 0, {"tools": LARGE + b"x", "system": b"short"})
    first = an_intent(
        rich, request=request, lineage=b"\0\1", agent="sub", hints={"a": "ü"}, sampling_sent={"stop": ["a", 1.5]},
        break_=Break(BreakReason.HISTORY_EDITED, "x", None, 3, None),
        injected=(InjectedMessage(1, 2, "user", "a hint", 0),),
    )  # fmt: skip
    await log.append_intent(first)
    nan = np.array([np.nan, -0.25], np.float32)
    await log.append_completion(
        a_completion(
            first.id, logprobs=nan, flaw=Flaw.LOGPROBS_NOT_FINITE, versions=(VersionSpan(3, 0, 2),), message=LARGE,
            usage={"prompt": 3}, extras={"top": np.arange(6, dtype=np.int64).reshape(2, 3)},
            masked=((0, 1),),
        )
    )  # fmt: skip
    await log.append_delivery(first.id, False)
    await append(log, rich, parent_id=first.id, shared=5, output_ids=ids(*range(300)))
    await append(log, plain, request=RequestParts(b"{}", (LARGE,)))
    await log.append_intent(an_intent(plain, process="another"))
    await log.abort_orphans(["process"], at=9.0)
    await log.append_intent(an_intent(plain))
    await log.close_session(rich.id, 88.5)
    await log.set_log_check(rich.id, LogCheck(LogVerdict.MISMATCH, "a reply too few"))


async def test_a_log_goes_to_postgres_and_back_unchanged(tmp_path: Path, postgres_url: str):
    one = await opened(f"sqlite:///{tmp_path}/one.db")
    await fill(one)
    before = await contents(one)
    assert all(before[name] for name in ("sessions", "parts", "call_intents", "call_completions", "deliveries"))
    moved = await export_sessions(one.database, tmp_path / "one.rtlog")
    assert (moved.sessions, moved.calls) == (3, 5)
    middle = await opened(postgres_url)
    assert (await import_sessions(middle.database, tmp_path / "one.rtlog")).new == 3
    assert await contents(middle) == before
    await export_sessions(middle.database, tmp_path / "middle.rtlog")
    last = await opened(f"sqlite:///{tmp_path}/last.db")
    await import_sessions(last.database, tmp_path / "middle.rtlog")
    assert await contents(last) == before
    async for session in one.all_sessions():
        assert await last.session_by_key(session.key_hash) == session
        for row, other in zip(await one.rows(session.id), await last.rows(session.id), strict=True):
            assert same_fact(row, other)
    for log in (one, middle, last):
        await log.close()


async def test_a_second_import_changes_nothing_and_a_later_one_brings_up_to_date(sql_log: SqlCallLog, tmp_path: Path):
    source = await opened(f"sqlite:///{tmp_path}/source.db")
    session = a_session()
    await source.open_session(session)
    first = await append(source, session)
    await export_sessions(source.database, tmp_path / "1.rtlog")
    assert (await import_sessions(sql_log.database, tmp_path / "1.rtlog")).new == 1
    assert (await import_sessions(sql_log.database, tmp_path / "1.rtlog")).new == 0
    await append(source, session, parent_id=first.id, shared=5)
    await source.close_session(session.id, 77.0)
    await export_sessions(source.database, tmp_path / "2.rtlog")
    assert (await import_sessions(sql_log.database, tmp_path / "2.rtlog")).new == 1
    assert await contents(sql_log) == await contents(source)
    assert (await import_sessions(sql_log.database, tmp_path / "1.rtlog")).new == 0
    await source.close()


async def test_rows_that_clash_or_fail_their_checks_are_refused_whole(sql_log: SqlCallLog, tmp_path: Path):
    session = a_session()
    await sql_log.open_session(session)
    intent = await append(sql_log, session)
    await export_sessions(sql_log.database, tmp_path / "good.rtlog")
    (block,) = read_archive(tmp_path / "good.rtlog")
    block.session[1] = "another policy"
    with ArchiveWriter(tmp_path / "clash.rtlog") as archive:
        archive.add(block)
    before = await contents(sql_log)
    with pytest.raises(RecordCorrupt, match=f"{session.id} is already in the store with other values"):
        await import_sessions(sql_log.database, tmp_path / "clash.rtlog")
    (block,) = read_archive(tmp_path / "good.rtlog")
    block.session[:3] = "other", "policy", "other key"
    block.intents[0][:2] = "other call", "other"
    block.completions.clear()
    block.deliveries.clear()
    with ArchiveWriter(tmp_path / "bad.rtlog") as archive:
        archive.add(block)
    with pytest.raises(RecordCorrupt, match="other call"):
        await import_sessions(sql_log.database, tmp_path / "bad.rtlog")
    assert await contents(sql_log) == before
    assert intent.id in str(before)


@pytest.mark.parametrize("planted", ["call", "completion", "delivery"])
async def test_an_archive_changes_no_other_session(sql_log: SqlCallLog, tmp_path: Path, planted: str):
    """A crafted archive: its hash is right, but a row belongs to a session of the store that is still to be trained."""
    victim, own = a_session(), a_session()
    await sql_log.open_session(victim)
    crashed = an_intent(victim, process="dead")
    await sql_log.append_intent(crashed)
    await sql_log.abort_orphans(["alive"], at=9.0)  # its completion is presumed: a later one may replace it
    before = await contents(sql_log)
    source = await opened(f"sqlite:///{tmp_path / 'source.db'}")
    await source.open_session(own)
    await append(source, own)
    await export_sessions(source.database, tmp_path / "own.rtlog")
    await source.close()
    (block,) = read_archive(tmp_path / "own.rtlog")
    if planted == "call":
        block.intents.append(list(intent_row(an_intent(victim))[0]))
    elif planted == "completion":
        block.completions.append(list(completion_row(a_completion(crashed.id, output_ids=ids(66, 66)))))
    else:
        block.deliveries.append([crashed.id, True])
    with ArchiveWriter(tmp_path / "crafted.rtlog") as archive:
        archive.add(block)
    with pytest.raises(RecordCorrupt, match="belongs to another session"):
        await import_sessions(sql_log.database, tmp_path / "crafted.rtlog")
    assert await contents(sql_log) == before


NOTE = ["n1", "", None, "label", "good", "true", "me", 5.0]
CRAFTED = {
    "tags of another shape": ("session", 7, '{"a": {"b": "c"}}'),
    "deep tags": ("session", 7, "[" * 100_000),
    "a long tag": ("session", 7, '{"a": "%s"}' % ("x" * 10_000)),
    "a tenant's name": ("session", 7, '{"rolltap.tenant": "../x"}'),
    "a date": ("session", 3, 1e18),
    "no date": ("session", 4, float("nan")),
    "a call's date": ("intents", 3, -1e12),
    "a reply's date": ("completions", 2, float("inf")),
    "a note's value": ("notes", 5, "[" * 100_000),
    "a note's kind": ("notes", 3, "verdict"),
    "a note's score": ("notes", 3, "score"),
    "a note's date": ("notes", 7, 1e300),
}


@pytest.mark.parametrize("name", CRAFTED)
async def test_an_archive_brings_nothing_that_the_api_would_refuse(sql_log: SqlCallLog, tmp_path: Path, name: str):
    source, own = await opened(f"sqlite:///{tmp_path / 'source.db'}"), a_session()
    await source.open_session(own)
    await append(source, own)
    await export_sessions(source.database, tmp_path / "own.rtlog")
    await source.close()
    (block,) = read_archive(tmp_path / "own.rtlog")
    block.notes.append([NOTE[0], own.id, *NOTE[2:5], '"yes"', *NOTE[6:]])
    table, column, value = CRAFTED[name]
    row = block.session if table == "session" else getattr(block, table)[0]
    row[column] = value
    with ArchiveWriter(tmp_path / "crafted.rtlog") as archive:
        archive.add(block)
    before = await contents(sql_log)
    with pytest.raises(RecordCorrupt, match=f"cannot import session {own.id}"):
        await import_sessions(sql_log.database, tmp_path / "crafted.rtlog")
    assert await contents(sql_log) == before


async def test_a_damaged_file_is_told_from_a_whole_one(sql_log: SqlCallLog, tmp_path: Path):
    for _ in range(3):
        session = a_session()
        await sql_log.open_session(session)
        await append(sql_log, session, output_ids=np.arange(5000, dtype=np.int32))
    path = tmp_path / "a.rtlog"
    await export_sessions(sql_log.database, path)
    data = path.read_bytes()
    for length in (10, 40, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(RecordCorrupt, match=r"not a file|cut off|damaged"):
            list(read_archive(path))
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(RecordCorrupt, match="damaged"):
        list(read_archive(path))


async def test_a_failed_export_leaves_nothing_behind(sql_log: SqlCallLog, tmp_path: Path):
    path = tmp_path / "a.rtlog"
    with pytest.raises(NotFound, match="nobody"):
        await export_sessions(sql_log.database, path, only=["nobody"])
    assert not list(tmp_path.glob("*rtlog*"))  # noqa: ASYNC240
    await export_sessions(sql_log.database, path)
    with pytest.raises(ConfigError, match="exists"):
        await export_sessions(sql_log.database, path)


async def test_a_list_shows_the_other_rows_when_one_can_not_be_read(sql_log: SqlCallLog) -> None:
    good, bad = a_session(), a_session()
    for session in (good, bad):
        await sql_log.open_session(session)
    deep = "[" * 100_000
    spoil = sa.update(sessions).where(sessions.c.id == bad.id).values(tags=deep)
    note = {"id": "n", "session_id": good.id, "kind": "label", "name": "x", "author": "", "created_at": 1.0}
    await sql_log.database.transact(lambda connection: connection.execute(spoil))
    await sql_log.database.transact(lambda connection: connection.execute(sa.insert(notes).values(**note, value=deep)))
    assert [session.id for session in await sql_log.sessions()] == [good.id]
    ids_ = [good.id, bad.id]
    read = await sql_log.database.query(lambda connection: fetch_summarized(connection, ids_))
    assert [session.id for session, _ in read] == [good.id]
    assert await sql_log.database.query(lambda connection: notes_of(connection, ids_)) == {good.id: []}
