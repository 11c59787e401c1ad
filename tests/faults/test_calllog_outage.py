"""A store that goes away under load: what was acknowledged is there when it is back, in full."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallIntent, LogCondition
from rolltap.calllog.spool import Spool, SpoolWriter
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.errors import ConfigError, StoreUnavailable
from rolltap.types import Outcome

from ..unit.calllog.facts import a_completion, a_session, an_intent, ids
from .load import DRAINED_WITHIN_S, Load, emptied


async def test_postgres_stopped_at_once_and_started_again_loses_nothing(private_postgres: Any, tmp_path: Path):
    log = open_call_log(private_postgres.url(), spools=[tmp_path / "spool"])
    await log.start()
    session = a_session()
    await log.open_session(session)
    load = Load(log, session)
    load.start(8)
    for _ in range(2):
        await load.reach(100)
        assert await log.condition() == LogCondition(store=True, spool=True)
        await asyncio.to_thread(private_postgres.stop, "immediate")
        await load.reach(100)
        assert await log.condition() == LogCondition(store=False, spool=True)
        assert await log.session_by_key(session.key_hash) == session
        with pytest.raises(StoreUnavailable):
            await log.rows(session.id)
        await asyncio.to_thread(private_postgres.start)
        await load.reach(100)
        assert await emptied(log) < DRAINED_WITHIN_S
    await load.end()
    await load.check()
    assert load.refused == 0
    await log.close()


async def test_a_process_that_ends_during_the_outage_leaves_its_calls_to_the_next(
    private_postgres: Any, tmp_path: Path
):
    log = open_call_log(private_postgres.url(), spools=[tmp_path / "spool"])
    await log.start()
    session = a_session()
    await log.open_session(session)
    await asyncio.to_thread(private_postgres.stop, "immediate")
    intent = an_intent(session)
    await log.append_intent(intent)
    await log.append_completion(a_completion(intent.id))
    await log.close()
    await asyncio.to_thread(private_postgres.start)
    again = open_call_log(private_postgres.url(), spools=[tmp_path / "spool"])
    await again.start()
    assert await again.abort_orphans([], at=1.0) == 0
    (row,) = await again.rows(session.id)
    assert row.call().outcome is Outcome.COMPLETED
    await again.close()


async def test_the_ends_of_open_calls_find_room_when_new_ones_are_refused(private_postgres: Any, tmp_path: Path):
    spool = Spool(tmp_path / "spool", 300_000)
    log = SqlCallLog(Database(private_postgres.url()), wrap=lambda direct: SpoolWriter(direct, spool))
    await log.start()
    session = a_session()
    await log.open_session(session)
    await asyncio.to_thread(private_postgres.stop, "immediate")
    opened: list[CallIntent] = []

    async def fill() -> None:
        while True:
            intent = replace(an_intent(session), new_ids=ids(*range(500)))
            await log.append_intent(intent)
            opened.append(intent)

    with pytest.raises(StoreUnavailable, match="spool is full") as refused:
        await fill()
    assert not (await log.condition()).takes_calls
    assert refused.value.retry_after
    for intent in opened:
        await log.append_completion(a_completion(intent.id))
    await asyncio.to_thread(private_postgres.start)
    assert await emptied(log) < DRAINED_WITHIN_S
    rows = await log.rows(session.id)
    assert [row.call().outcome for row in rows] == [Outcome.COMPLETED] * len(opened)
    await log.append_intent(an_intent(session))
    await log.close()


async def _order(url: str, order: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(order)
    await connection.close()


async def test_a_postgres_that_does_not_wait_for_its_disk_is_refused_at_start(postgres_url: str):
    database = postgres_url.rsplit("/", 1)[1]
    await _order(postgres_url, f"ALTER DATABASE {database} SET synchronous_commit = off")
    log = open_call_log(postgres_url)
    with pytest.raises(ConfigError, match="synchronous_commit is off"):
        await log.start()


async def test_a_postgres_without_fsync_is_warned_about_at_start(
    private_postgres: Any, caplog: pytest.LogCaptureFixture
):
    await _order(private_postgres.url(), "ALTER SYSTEM SET fsync = off")
    await asyncio.to_thread(private_postgres.stop)
    await asyncio.to_thread(private_postgres.start)
    log = open_call_log(private_postgres.url())
    await log.start()
    await log.close()
    assert "fsync=off: loss of power LOSES acknowledged calls" in caplog.text
