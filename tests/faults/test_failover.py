"""A Postgres that fails over under load: everything serves again by itself, and what was acknowledged is there."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa

from rolltap.calllog.schema import sessions
from rolltap.calllog.sql import open_call_log
from rolltap.errors import NotFound, StoreUnavailable
from rolltap.ledger.unit_of_work import LedgerSettings, Tx, UnitOfWork

from ..conftest import PostgresServer
from ..unit.calllog.facts import a_session
from .load import DRAINED_WITHIN_S, Load, emptied
from .relay import Relay, relayed

GOAL_S = 10.0
SERVES_WITHIN_S = 3 * GOAL_S
"""On a machine that does other things as well."""
FAILOVERS = int(os.environ.get("ROLLTAP_FAILOVERS", "3"))


@dataclass
class Pair:
    """A primary with a synchronous standby, and the address under which clients find the primary."""

    primary: PostgresServer
    standby: PostgresServer
    address: Relay
    _stopped: bool = False

    async def order(self, server: PostgresServer, *orders: str) -> None:
        connection = await asyncpg.connect(server.url(), server_settings={"synchronous_commit": "local"})
        for order in orders:
            await connection.execute(order)
        await connection.close()

    async def replicate(self) -> None:
        """Makes the standby a new copy of the primary. From then on a commit waits for it."""
        await asyncio.to_thread(self.standby.follow, self.primary)
        await asyncio.to_thread(self.standby.start)
        await self.order(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")

    async def fail_over(self, kind: str) -> None:
        """Promotes the standby, and leads new connections to it. The old primary stays up but for `killed`."""
        if kind == "read-only":
            await self.order(
                self.primary, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"
            )
        elif kind == "killed":
            await asyncio.to_thread(self.primary.stop, "immediate")
        await asyncio.to_thread(self.standby.promote)
        await self.order(
            self.standby,
            "ALTER SYSTEM RESET synchronous_standby_names",
            "ALTER SYSTEM RESET default_transaction_read_only",
            "SELECT pg_reload_conf()",
        )
        self.address.port = self.standby.port
        self.primary, self.standby = self.standby, self.primary
        self._stopped = kind == "killed"

    async def repair(self) -> None:
        """Stops the old primary, and makes it a standby of the new one."""
        if not self._stopped:
            await asyncio.to_thread(self.standby.stop, "immediate")
        await self.replicate()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    servers = [await asyncio.to_thread(PostgresServer, durable=False) for _ in range(2)]
    await asyncio.to_thread(servers[0].start)
    async with relayed("127.0.0.1", servers[0].port) as address:
        pair = Pair(servers[0], servers[1], address)
        await pair.replicate()
        yield pair
    for server in servers:
        await asyncio.to_thread(server.remove)


@dataclass
class Ledger:
    """A client that writes a row a turn, as the ledger does, and knows when it was last refused."""

    log: Any
    session_id: str
    served_at: float = 0.0
    longest_s: float = 0.0
    refusals: set[str] = field(default_factory=set)

    async def run(self) -> None:
        turn = 0
        self.served_at = time.monotonic()
        while True:
            turn += 1
            change = sa.update(sessions).where(sessions.c.id == self.session_id).values(expires_at=2e9 + turn)
            try:
                async with asyncio.timeout(GOAL_S):
                    await self.log.database.transact(lambda connection, change=change: connection.execute(change))
            except (StoreUnavailable, TimeoutError) as error:
                self.refusals.add(str(error) or "no answer")
                await asyncio.sleep(0.05)
                continue
            self.longest_s = max(self.longest_s, time.monotonic() - self.served_at)
            self.served_at = time.monotonic()
            await asyncio.sleep(0.02)


async def test_after_each_failover_calls_and_ledger_serve_again_and_nothing_is_lost(pair: Pair, tmp_path: Path):
    """Takes about 8 CPU seconds: every failover needs a new copy of the cluster."""
    url = f"postgresql://rolltap@127.0.0.1:{pair.address.own_port}/postgres"
    log = open_call_log(url, spools=[tmp_path / "spool"])
    await log.start()
    session = a_session()
    await log.open_session(session)
    ledger = Ledger(log, session.id)
    writing = asyncio.create_task(ledger.run())
    load = Load(log, session)
    load.start(4)
    served_after: list[float] = []
    for number in range(FAILOVERS):
        await load.reach(50)
        await pair.fail_over(("read-only", "killed", "unfenced")[number % 3])
        moved_at = time.monotonic()
        while ledger.served_at < moved_at or not (await log.condition()).store:
            assert time.monotonic() < moved_at + SERVES_WITHIN_S, ledger.refusals
            assert not writing.done()
            await asyncio.sleep(0.05)
        served_after.append(time.monotonic() - moved_at)
        print(f"failover {number}: everything serves again after {served_after[-1]:.1f} s")
        await load.reach(50)
        assert await emptied(log) < DRAINED_WITHIN_S
        await pair.repair()
    writing.cancel()
    await load.end()
    await load.check()
    assert load.refused == 0
    assert statistics.median(served_after) < GOAL_S
    assert ledger.longest_s < SERVES_WITHIN_S + 2
    await log.close()


LATER = 3e9
FOUND = sa.select(sessions.c.id).where(sessions.c.expires_at == LATER)


async def _forget(session_id: str) -> None: ...


def _changed(tx: Tx) -> bool:
    return tx.run(sa.update(sessions).where(sessions.c.expires_at != LATER).values(expires_at=LATER)) > 0


def _looked_up(tx: Tx) -> bool:
    return tx.first(FOUND) is None and _changed(tx)


def _missing(tx: Tx) -> bool:
    raise NotFound("no group 'g', as this server never got it")


@pytest.mark.parametrize("work", [_changed, _looked_up, _missing])
async def test_a_replaced_primary_that_serves_on_acknowledges_nothing_and_knows_of_nothing_missing(
    work: Callable[[Tx], bool], pair: Pair, tmp_path: Path
) -> None:
    """It has what was cancelled while it waited for the standby, and lacks what the new primary got since. So whoever
    asks again, or is to hear that something does not exist, waits for the standby, too."""
    url = f"postgresql://rolltap@127.0.0.1:{pair.address.own_port}/postgres"
    log = open_call_log(url, spools=[tmp_path / "spool"])
    await log.start()
    await log.open_session(a_session())
    transactions = UnitOfWork(log.database, close_session=_forget, settings=LedgerSettings())
    await asyncio.to_thread(pair.standby.stop, "immediate")
    first = asyncio.create_task(transactions.transact(_changed))
    await asyncio.sleep(1)
    waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE 'COMMIT%'"
    await pair.order(pair.primary, f"SELECT pg_terminate_backend(pid) {waiting}")
    with pytest.raises(StoreUnavailable):
        await first
    assert await log.database.select(FOUND)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await transactions.transact(work)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await transactions.query(_missing)
    await asyncio.to_thread(pair.standby.start)
    async with asyncio.timeout(SERVES_WITHIN_S):
        await transactions.transact(_changed)
        with pytest.raises(NotFound):
            await transactions.query(_missing)
    await log.close()


async def test_a_replaced_primary_acknowledges_no_call_that_it_has_already(pair: Pair) -> None:
    """It has it from a commit that was cancelled while it waited for the standby: the second one would not wait."""
    log = open_call_log(f"postgresql://rolltap@127.0.0.1:{pair.address.own_port}/postgres")
    await log.start()
    session = a_session()
    await asyncio.to_thread(pair.standby.stop, "immediate")
    writing = asyncio.create_task(log.open_session(session))
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    async with asyncio.timeout(SERVES_WITHIN_S):
        while not await log.database.select(sa.select(sessions.c.id)):
            await pair.order(pair.primary, f"SELECT pg_terminate_backend(pid) FROM ({waiting}) waiting")
            await asyncio.sleep(0.2)
    await asyncio.sleep(1)
    assert not writing.done()
    await asyncio.to_thread(pair.standby.start)
    async with asyncio.timeout(SERVES_WITHIN_S):
        await writing
    await log.close()
