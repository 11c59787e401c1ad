"""Retention: what is not acknowledged or exported stays, whatever its age."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from rolltap.calllog import prune as retention
from rolltap.calllog.archive import ArchiveWriter, export_sessions, import_sessions
from rolltap.calllog.archive_block import Block
from rolltap.calllog.facts import RequestParts
from rolltap.calllog.prune import PruneResult, Reason, exported_in, plan_pruning, prune
from rolltap.calllog.schema import parts, prunings
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.calllog.verify import verify
from rolltap.cli.main import app
from rolltap.contract.trainer import LeaseRequest, Replay
from rolltap.ledger.keys import note_prune
from rolltap.ledger.schema import audit
from rolltap.ledger.views import group_uses
from rolltap.types import Session

from ..ledger.world import World, key
from .facts import a_session, an_intent, append

LARGE = b'{"text": "%s"}' % (b"large " * 400)
EXPIRED = {"expires_at": 5.0, "rollout_id": None}


def nobody(connection: sa.Connection, session_ids: object) -> dict[str, Any]:
    """The uses of no ledger."""
    return {}


async def ended(log: SqlCallLog, **changes: object) -> Session:
    """A session that ended long ago, with a call."""
    session = a_session(**EXPIRED | changes)
    await log.open_session(session)
    await append(log, session, request=RequestParts(b"{}", (LARGE,)))
    return session


async def reasons(log: SqlCallLog, *, before: float = 100.0, **options: Any) -> dict[str, Reason]:
    options = {"exported": {}, "uses": nobody} | options
    return {one.session_id: one.reason for one in await plan_pruning(log.database, before=before, **options)}


async def test_only_what_an_archive_holds_goes_and_comes_back_from_it(sql_log: SqlCallLog, tmp_path: Path):
    old, other = await ended(sql_log), await ended(sql_log)
    recent, still_open = await ended(sql_log, expires_at=150.0), await ended(sql_log, expires_at=4e9)
    under_way = await ended(sql_log)
    await sql_log.append_intent(an_intent(under_way))
    path = tmp_path / "keep.rtlog"
    names = [session.id for session in (old, recent, still_open, under_way)]
    await export_sessions(sql_log.database, path, only=names)
    exported = exported_in([path])
    expected = {
        old.id: Reason.EXPORTED,
        other.id: Reason.NOT_EXPORTED,
        recent.id: Reason.RECENT,
        still_open.id: Reason.OPEN,
        under_way.id: Reason.UNDER_WAY,
    }
    assert await reasons(sql_log, exported=exported) == expected
    done = await prune(sql_log.database, before=100.0, exported=exported, uses=nobody)
    assert done == PruneResult(1, 1, 0)
    assert [len(await sql_log.rows(session.id)) for session in (old, other, recent)] == [0, 1, 1]
    assert await sql_log.session_by_key(old.key_hash) == old
    del expected[old.id]
    assert await reasons(sql_log, exported=exported) == expected
    assert (await verify(sql_log.database)).problems == []
    await import_sessions(sql_log.database, path, own=True)
    assert len(await sql_log.rows(old.id)) == 1
    assert await sql_log.database.query(lambda connection: connection.execute(sa.select(prunings)).all()) == []


async def test_a_session_that_went_on_after_its_export_stays(sql_log: SqlCallLog, tmp_path: Path):
    session = await ended(sql_log)
    await export_sessions(sql_log.database, tmp_path / "keep.rtlog")
    exported = exported_in([tmp_path / "keep.rtlog"])
    call = (await append(sql_log, session)).id
    assert await reasons(sql_log, exported=exported) == {session.id: Reason.CHANGED}
    await export_sessions(sql_log.database, tmp_path / "again.rtlog")
    exported = exported_in([tmp_path / "again.rtlog"])
    await sql_log.append_delivery(call, False)
    assert await reasons(sql_log, exported=exported) == {session.id: Reason.CHANGED}


async def test_what_no_import_would_bring_back_is_not_exported(sql_log: SqlCallLog, tmp_path: Path):
    """An archive has it, but it would be refused: its calls would be gone."""
    sound, odd = await ended(sql_log), await ended(sql_log)
    await append(sql_log, odd, agent="a" * 9000)
    path = tmp_path / "keep.rtlog"
    await export_sessions(sql_log.database, path)
    exported = exported_in([path])
    assert await reasons(sql_log, exported=exported) == {sound.id: Reason.EXPORTED, odd.id: Reason.NOT_EXPORTED}


@pytest.mark.parametrize(("session", "intents"), [([], []), (["s"], [[]]), (["s"], [["c", "x"]]), ([["x"]], [])])
def test_an_archive_of_odd_rows_keeps_nothing(session: list[Any], intents: list[list[Any]], tmp_path: Path):
    with ArchiveWriter(tmp_path / "odd.rtlog") as archive:
        archive.add(Block(session, [], intents, [], [], None))
    assert exported_in([tmp_path / "odd.rtlog"]) == {}


async def test_large_parts_go_with_their_last_call_but_not_while_a_writer_may_rely_on_them(
    sql_log: SqlCallLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await ended(sql_log)
    shared = await ended(sql_log)
    path = tmp_path / "keep.rtlog"
    await export_sessions(sql_log.database, path)
    exported = exported_in([path])
    monkeypatch.setattr(retention, "PART_SPARED_S", -60.0)
    only_first = {key: value for key, value in exported.items() if key != shared.id}
    assert await prune(sql_log.database, before=100.0, exported=only_first, uses=nobody) == PruneResult(1, 1, 0)
    monkeypatch.undo()
    assert await prune(sql_log.database, before=100.0, exported=exported, uses=nobody) == PruneResult(1, 1, 0)
    monkeypatch.setattr(retention, "PART_SPARED_S", -60.0)
    await ended(sql_log)
    await sql_log.database.transact(lambda connection: connection.execute(sa.update(parts).values(hash=b"x" * 32)))
    assert await sql_log.database.transact(retention._remove_parts) == 1


async def test_a_group_must_be_acknowledged_long_ago_and_not_be_leased_again(sql_log: SqlCallLog):
    world = World(sql_log.database)
    await world.ledger.policies.register("policy", tokenizer_hash="abc")
    group = await world.complete(1)
    waiting = await world.open(1)
    first = group.rollouts[0].session_id or ""
    started = await world.start(waiting.rollouts[0])
    for session_id in (first, started.session_id):
        session = a_session(id=session_id, **EXPIRED)
        await sql_log.open_session(session)
        await append(sql_log, session)
    held = {"uses": group_uses}
    late = time.time() + 60
    assert set((await reasons(sql_log, before=late, **held)).values()) == {Reason.WAITING}
    wanted = LeaseRequest("trainer", "policy", 1)
    lease = await world.ledger.trainers.lease(wanted)
    assert (await reasons(sql_log, before=late, **held))[first] == Reason.WAITING
    await world.ledger.trainers.acknowledge(key(lease), 1)
    assert (await reasons(sql_log, before=100.0, **held))[first] == Reason.ACKNOWLEDGED_RECENTLY
    again = await world.ledger.trainers.lease(msgspec.structs.replace(wanted, replay=Replay()))
    assert (await reasons(sql_log, before=late, **held))[first] == Reason.REPLAYED
    await world.ledger.trainers.release(key(again))
    assert (await reasons(sql_log, before=late, **held))[first] == Reason.ACKNOWLEDGED
    done = await prune(sql_log.database, before=late, exported={}, uses=group_uses)
    assert (done.sessions, done.calls) == (1, 1)
    assert list(await reasons(sql_log, before=late, **held)) == [started.session_id]


def test_the_command_says_what_stays_and_removes_nothing_in_a_dry_run(tmp_path: Path):

    url = f"sqlite:///{tmp_path}/log.db"

    async def fill() -> None:
        log = open_call_log(url)
        await log.start()
        await ended(log)
        await log.close()

    asyncio.run(fill())
    run = CliRunner().invoke
    keep = str(tmp_path / "keep.rtlog")
    arguments = ["log", "prune", "--older-than", "1d", "--store", url]
    kept = run(app, arguments)
    assert kept.exit_code == 0
    assert "not exported" in kept.output
    assert "removed 0 calls" in kept.output
    assert run(app, ["log", "export", keep, "--store", url]).exit_code == 0
    dry = run(app, [*arguments, "--exported", keep, "--dry-run"])
    assert "dry run: nothing was removed" in dry.output
    assert "goes" in dry.output
    assert '"calls": 1' in run(app, ["log", "stats", "--json", "--store", url]).output
    assert "removed 1 call of 1 session" in run(app, [*arguments, "--exported", keep]).output
    assert '"pruned_sessions": 1' in run(app, ["log", "stats", "--json", "--store", url]).output
    assert "import it with --own" in run(app, ["log", "import", keep, "--store", url]).output
    assert run(app, ["log", "import", keep, "--own", "--store", url]).exit_code == 0
    assert '"calls": 1' in run(app, ["log", "stats", "--json", "--store", url]).output
    assert "30d" in run(app, ["log", "prune", "--older-than", "soon", "--store", url]).output


async def test_a_prune_is_noted_for_a_user_without_a_name(sql_log: SqlCallLog, monkeypatch: pytest.MonkeyPatch):
    """A container may run under a number that stands in no list of users."""
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_001)
    await sql_log.database.transact(lambda connection: note_prune(connection, "30d", ()))
    noted = await sql_log.database.query(lambda connection: connection.execute(sa.select(audit)).all())
    assert [entry.key_id for entry in noted] == ["user 4000001"]
