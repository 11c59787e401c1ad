"""Forks in an archive, under verification, and when calls are removed: what a fork needs stays with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rolltap.calllog.archive import export_sessions, import_sessions
from rolltap.calllog.prune import Reason, exported_in, plan_pruning, prune
from rolltap.calllog.schema import call_intents, sessions
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.calllog.verify import verify
from rolltap.errors import RecordCorrupt
from rolltap.types import Origin, Session

from .facts import a_session, append, ids


def nobody(connection: sa.Connection, session_ids: object) -> dict[str, Any]:
    return {}


async def family(log: SqlCallLog, **last: object) -> list[Session]:
    """A session, a fork of it, and a fork of that one; all have ended but for what `last` says of the last one."""
    session = a_session(expires_at=5.0)
    await log.open_session(session)
    call = await append(log, session)
    fork = a_session(expires_at=5.0, origin=Origin(session.id, call.id))
    await log.open_session(fork)
    child = await append(log, fork, parent_id=call.id, shared=5, new_ids=ids(6), output_ids=ids(7))
    deeper = a_session(**{"expires_at": 5.0, "origin": Origin(fork.id, child.id, 0)} | last)
    await log.open_session(deeper)
    await append(log, deeper, parent_id=child.id, shared=6, new_ids=ids())
    return [session, fork, deeper]


async def test_an_archive_of_a_fork_holds_its_origins_and_is_imported_in_their_order(
    sql_log: SqlCallLog, tmp_path: Path
):
    sessions_made = await family(sql_log)
    await sql_log.open_session(a_session())
    path = tmp_path / "fork.rtlog"
    assert (await export_sessions(sql_log.database, path, only=[sessions_made[2].id])).sessions == 3
    other = open_call_log(f"sqlite:///{tmp_path}/other.db")
    await other.start()
    assert (await import_sessions(other.database, path)).new == 3
    for session in sessions_made:
        assert await other.session(session.id) == session
        assert [row.prompt_ids.tolist() for row in await other.rows(session.id)] == [
            row.prompt_ids.tolist() for row in await sql_log.rows(session.id)
        ]
    assert (await verify(other.database)).problems == []
    await other.close()


async def test_what_is_wrong_with_an_origin_is_told(sql_log: SqlCallLog, tmp_path: Path):
    first, fork, deeper = await family(sql_log)
    assert (origin := fork.origin) is not None
    assert (await verify(sql_log.database)).problems == []
    await export_sessions(sql_log.database, tmp_path / "all.rtlog")
    gone = sa.delete(call_intents).where(call_intents.c.session_id == first.id)
    await sql_log.database.transact(lambda connection: connection.execute(gone))
    report = await verify(sql_log.database)
    assert any(f"session {fork.id}: was forked from session {first.id}" in text for text in report.problems)
    assert any(origin.call_id in text and "is not in the log" in text for text in report.problems)
    with pytest.raises(RecordCorrupt, match="is not in the log"):
        await sql_log.calls([deeper.id])
    moved = sa.update(sessions).where(sessions.c.id == fork.id).values(origin_session="another")
    await sql_log.database.transact(lambda connection: connection.execute(moved))
    with pytest.raises(RecordCorrupt):
        await import_sessions(sql_log.database, tmp_path / "all.rtlog")


@pytest.mark.parametrize("stays", ["open", "recent", "nothing"])
async def test_the_calls_that_a_fork_continues_stay_as_long_as_it(sql_log: SqlCallLog, tmp_path: Path, stays: str):
    last = {"open": {"expires_at": 4e9}, "recent": {"expires_at": 500.0}, "nothing": {}}[stays]
    made = await family(sql_log, **last)
    path = tmp_path / "all.rtlog"
    await export_sessions(sql_log.database, path)
    options = {"before": 100.0, "exported": exported_in([path]), "uses": nobody}
    plan = {one.session_id: one.reason for one in await plan_pruning(sql_log.database, **options)}
    kept = {"open": Reason.OPEN, "recent": Reason.RECENT}.get(stays)
    expected = [Reason.FORKED, Reason.FORKED, kept] if kept else [Reason.EXPORTED] * 3
    assert [plan[session.id] for session in made] == expected
    removed = await prune(sql_log.database, **options)
    assert removed.sessions == (0 if kept else 3)
    assert (await verify(sql_log.database)).problems == []
    assert len((await sql_log.calls([made[2].id]))[made[2].id][1]) == (3 if kept else 0)


async def test_an_open_fork_without_a_call_keeps_its_origin(sql_log: SqlCallLog, tmp_path: Path):
    session = a_session(expires_at=5.0)
    await sql_log.open_session(session)
    call = await append(sql_log, session)
    fork = a_session(expires_at=4e9, origin=Origin(session.id, call.id))
    await sql_log.open_session(fork)
    await export_sessions(sql_log.database, tmp_path / "all.rtlog")
    options = {"before": 100.0, "exported": exported_in([tmp_path / "all.rtlog"]), "uses": nobody}
    assert (await prune(sql_log.database, **options)).sessions == 0
    await sql_log.close_session(fork.id, 9.0)
    assert (await prune(sql_log.database, **options)).sessions == 1
    assert (await verify(sql_log.database)).problems == []
    assert (await sql_log.calls([fork.id]))[fork.id] == (await sql_log.session(fork.id), [])
