"""A ledger on each kind of database, emptied before every test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rolltap.calllog.database import Database
from rolltap.ledger.schema import metadata

from ..unit.ledger.world import KINDS, World, database_url, empty


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres_server_url: str
) -> AsyncIterator[Database]:
    folder: Path = tmp_path_factory.mktemp("ledger")
    async with database_url(request.param, folder, postgres_server_url) as url:
        opened = Database(url)
        await opened.start(metadata)
        yield opened
        await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def world(database: Database) -> World:
    await empty(database)
    world = World(database)
    await world.ledger.policies.register("policy", tokenizer_hash="abc")
    return world
