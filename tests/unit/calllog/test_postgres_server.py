"""Pooled connections whose server is alive but not the right one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa

from rolltap.calllog.backend import Durability, Insert
from rolltap.calllog.database import Database
from rolltap.calllog.postgres import ServerCheck, ServerState, _opened
from rolltap.calllog.sql import open_call_log
from rolltap.errors import LeaseLost, NotFound, StoreUnavailable, UnknownPolicy
from rolltap.ledger.policies import PolicyVersions
from rolltap.ledger.unit_of_work import LedgerSettings, Tx, UnitOfWork

from .facts import a_completion, a_session, an_intent

metadata = sa.MetaData()
things = sa.Table(
    "things", metadata, sa.Column("id", sa.Text, primary_key=True), sa.Column("size", sa.Integer, nullable=False)
)

PRIMARY = ServerState(recovering=False, read_only=False, forgetful=False, cluster=7, timeline=3, now=0.0)


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    database = Database(postgres_url)
    await database.start(metadata)
    yield database
    await database.close()


async def spoil(database: Any, order: str) -> None:
    """Runs `order` on the pooled connections, and on that of `insert`."""
    backend = database._backend
    for engine in (backend._engine, backend._singles):
        async with engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            await driver.execute(order)
    await backend._inserter.driver_connection.execute(order)


def put(name: str) -> Any:
    return lambda connection: connection.execute(sa.insert(things).values(id=name, size=1))


async def insert(database: Database, name: str) -> None:
    await database.insert({Insert(things, database.dialect): [(name, 1)]}, Durability.POWER)


READ_ONLY = "SET default_transaction_read_only = on"


@pytest.mark.parametrize("order", [READ_ONLY, "SELECT pg_terminate_backend(pg_backend_pid())"])
async def test_every_way_to_the_store_leaves_a_wrong_server_after_one_error(database: Database, order: str):
    await insert(database, "zero")
    with suppress(asyncpg.PostgresError):
        await spoil(database, order)
    refused = 0
    for name in "abc":
        for write in (database.transact(put(f"{name}1")), insert(database, f"{name}2")):
            try:
                await write
            except StoreUnavailable:
                refused += 1
    assert refused <= 1, "the first error makes every connection be checked"
    await database.check()


async def test_a_read_only_server_is_not_the_store_and_a_right_one_is_at_once(postgres_url: str):
    log = open_call_log(postgres_url)
    await log.start()
    session = a_session()
    await log.open_session(session)
    owner = await asyncpg.connect(postgres_url)
    name = postgres_url.rsplit("/", 1)[1]
    await spoil(log.database, READ_ONLY)  # type: ignore[attr-defined]
    await owner.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert not (await log.condition()).store
    with pytest.raises(StoreUnavailable, match="read-only"):
        await log.append_intent(an_intent(session))
    await owner.execute("SET default_transaction_read_only = off")
    await owner.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    await owner.close()
    assert (await log.condition()).store
    intent = an_intent(session)
    await log.append_intent(intent)
    await log.append_completion(a_completion(intent.id))
    await log.close()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (replace(PRIMARY, recovering=True, timeline=0), "in recovery"),
        (replace(PRIMARY, read_only=True), "read-only"),
        (replace(PRIMARY, forgetful=True), "synchronous_commit is off"),
        (replace(PRIMARY, timeline=2), "promoted"),
        (replace(PRIMARY, cluster=8), "another cluster"),
    ],
)
def test_a_wrong_server_is_refused_in_words(state: ServerState, words: str):
    check = ServerCheck("store", writable=True)
    check.judge(PRIMARY)
    with pytest.raises(StoreUnavailable, match=words):
        check.judge(state)
    check.judge(replace(PRIMARY, timeline=4))
    with pytest.raises(StoreUnavailable, match="promoted"):
        check.judge(PRIMARY)


def test_a_promotion_that_another_process_saw_ends_the_connections_to_the_old_server():
    check = ServerCheck("store", writable=False)
    check.judge(PRIMARY)
    ended: list[str] = []

    class Driver:
        def __init__(self, name: str) -> None:
            self.terminate = partial(ended.append, name)

    old, new = Driver("old"), Driver("new")
    check._timelines[old], check._timelines[new] = PRIMARY.timeline, PRIMARY.timeline + 1
    check.expect(PRIMARY.timeline)
    assert not ended
    check.expect(PRIMARY.timeline + 1)
    assert ended == ["old"]
    with pytest.raises(StoreUnavailable, match="promoted"):
        check.judge(PRIMARY)
    check.expect(PRIMARY.timeline)  # a process that is behind
    assert check.timeline == PRIMARY.timeline + 1


def test_who_only_reads_may_read_a_standby_unless_it_began_with_a_primary():
    standby = replace(PRIMARY, recovering=True, read_only=True, timeline=0)
    check = ServerCheck("store", writable=False)
    check.judge(standby)
    check.judge(standby)
    check = ServerCheck("store", writable=False)
    check.judge(PRIMARY)
    with pytest.raises(StoreUnavailable, match="in recovery"):
        check.judge(standby)


async def test_a_wrong_clock_of_this_machine_is_told_and_expires_nothing(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    log = open_call_log(postgres_url)
    log._registry._beat_s = 0.05  # type: ignore[attr-defined]
    await log.start()
    right = time.time()
    assert not (await log.condition()).clock_is_off
    monkeypatch.setattr("time.time", lambda: right + 3 * 3600)
    assert abs(log.database.time() - right) < 60  # type: ignore[attr-defined]
    assert (await log.condition()).clock_is_off
    async with asyncio.timeout(20):
        while "clock is +10" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    monkeypatch.undo()
    await log.close()


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
        asyncpg.InterfaceError("connection is closed"),
        ConnectionResetError("reset by peer"),
    ],
)
async def test_a_connection_that_cannot_be_asked_is_of_a_store_that_is_away(error: Exception) -> None:
    class Broken:
        async def fetchrow(self, statement: str, timeout: float) -> None:
            raise error

    with pytest.raises(StoreUnavailable):
        await ServerCheck("pg", writable=True).of(Broken(), {})


class Connecting:
    """Stands for a pool's connection that fails as asyncpg does where it is cancelled while it connects."""

    def connect(self) -> Connecting:
        return self

    async def start(self) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")


async def test_what_is_cancelled_as_it_connects_is_cancelled() -> None:
    refused: list[StoreUnavailable] = []

    async def use() -> None:
        async with _opened(Connecting(), "the store", refused.append):  # type: ignore[arg-type]
            raise AssertionError

    task = asyncio.create_task(use())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await use()
    assert refused == []


async def test_a_fault_of_the_driver_is_a_store_that_is_away() -> None:
    refused: list[StoreUnavailable] = []
    connecting = Connecting()
    connecting.start = partial(failing, asyncpg.InternalClientError("its own"))  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="its own"):
        async with _opened(connecting, "the store", refused.append):  # type: ignore[arg-type]
            raise AssertionError
    assert len(refused) == 1


async def failing(error: Exception) -> None:
    raise error


SINCE_13 = (
    "gen_random_uuid gcd lcm min_scale trim_scale pg_current_xact_id pg_current_xact_id_if_assigned "
    "pg_current_snapshot pg_snapshot_xmin pg_snapshot_xmax pg_snapshot_xip pg_visible_in_snapshot pg_xact_status "
    "date_bin bit_count string_to_table trim_array unistr range_agg regexp_count regexp_instr regexp_like "
    "regexp_substr any_value"
)


async def test_the_oldest_server_has_the_functions_that_are_used(bare_postgres_url: str) -> None:
    """Without those that came after Postgres 12."""
    server = await asyncpg.connect(bare_postgres_url)
    renamed = "UPDATE pg_proc SET proname = proname || '_newer' WHERE proname = ANY($1)"
    assert await server.execute(renamed, SINCE_13.split()) != "UPDATE 0"
    await server.close()
    log = open_call_log(bare_postgres_url)
    await log.start()
    await log.abort_orphans(["here"], at=1.0)
    session = a_session()
    await log.open_session(session)
    await log.append_intent(an_intent(session, process="here"))
    unused: Any = None
    uow = UnitOfWork(log.database, close_session=unused, settings=LedgerSettings())
    await uow.transact(lambda tx: tx.note("kind", "subject"))
    await uow.transact(lambda tx: tx.first(sa.select(1)))
    await log.close()


ERRORS = (NotFound("no group 'g'"), UnknownPolicy("no policy 'p'"), LeaseLost("another trainer has it"))


async def test_nothing_is_denied_by_a_server_of_which_another_took_the_place_meanwhile(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What confirms the error may be the new server, and what was looked up was the old one."""
    log = open_call_log(postgres_url)
    await log.start()
    unused: Any = None
    backend: Any = log.database._backend
    uow = UnitOfWork(log.database, close_session=unused, settings=LedgerSettings())

    def missing(error: Exception, tx: Tx) -> None:
        raise error

    policies = PolicyVersions(uow)
    denials = [
        *((error, partial(ask, partial(missing, error))) for error in ERRORS for ask in (uow.transact, uow.query)),
        *((ERRORS[1], partial(ask, "none")) for ask in (policies.served, policies.get)),
    ]

    async def confirmed_by_the_next() -> None:
        monkeypatch.setattr(backend._check, "timeline", log.database.timeline + 1)

    for error, ask in denials:
        with pytest.raises(type(error)):
            await ask()
    monkeypatch.setattr(log.database, "confirm", confirmed_by_the_next)
    for _, ask in denials:
        with pytest.raises(StoreUnavailable, match="promoted"):
            await ask()
    monkeypatch.undo()
    await log.close()
