"""A process that can't reach the store, or has facts outside it, is known to its peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rolltap.calllog.database import Database
from rolltap.calllog.process_registry import PostgresRegistry
from rolltap.calllog.sql import SqlCallLog


@asynccontextmanager
async def process(url: str, name: str, beat_s: float = 0.02) -> AsyncIterator[SqlCallLog]:
    database = Database(url)
    log = SqlCallLog(database, registry=PostgresRegistry(database, beat_s=beat_s))
    await log.start()
    await log.abort_orphans([name], at=1.0)
    await log._registry._beat_once({})
    yield log
    await log.close()


async def test_peers_that_renew_their_row_are_waited_for_only_that_long(postgres_url: str):
    async with process(postgres_url, "a") as a, process(postgres_url, "b"):
        assert await a.peers_behind(10) == []


async def test_a_silent_peer_is_behind_until_it_is_back(postgres_url: str):
    async with process(postgres_url, "a") as a, process(postgres_url, "b", beat_s=600) as b:
        assert await a.peers_behind(0.2) == ["b"]
        waiting = asyncio.create_task(a.peers_behind(10))
        await asyncio.sleep(0.05)
        await b._registry._beat_once({})
        assert await waiting == []


async def test_a_peer_with_facts_outside_the_store_is_behind_though_it_answers(postgres_url: str):
    async with process(postgres_url, "a") as a, process(postgres_url, "b") as b:
        b._registry.waiting = lambda: 3
        await b._registry._beat_once({})
        assert await a.peers_behind(0.2) == ["b"]
        b._registry.waiting = lambda: 0
        assert await a.peers_behind(10) == []


async def test_nobody_waits_for_a_process_that_ended_well(postgres_url: str):
    async with process(postgres_url, "a") as a:
        async with process(postgres_url, "b"):
            pass
        assert await a.peers_behind(0) == []
