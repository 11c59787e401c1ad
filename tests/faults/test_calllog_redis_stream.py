"""The ingest stream itself: emptied while Postgres is away, wanted by two stores."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis

from rolltap.calllog.codec import encode_fact
from rolltap.calllog.facts import RequestParts
from rolltap.calllog.redis import MARK, OWNER, STREAM, IngestWriter
from rolltap.calllog.sql import open_call_log
from rolltap.errors import ConfigError, StoreUnavailable

from ..unit.calllog.facts import a_session, an_intent
from .test_calllog_redis import AwayStore


async def test_what_waits_for_postgres_is_appended_again_to_a_redis_that_was_emptied(
    postgres_url: str, private_redis: Any
):
    dies = IngestWriter(private_redis.url, AwayStore())
    await dies.start()
    session = a_session()
    request = RequestParts(b"", (), 0, {"tools": b"a large part " * 1000})
    intents = [an_intent(session, request=request) for _ in range(3)]
    async with Redis.from_url(private_redis.url) as client:
        for fact in (session, *intents[:2]):
            await dies.write([encode_fact(fact)])
        await client.flushall()
        await dies.write([encode_fact(intents[2])])
        async with asyncio.timeout(30):
            while not await client.keys(f"{MARK}*"):  # noqa: ASYNC110 - the writer sets it again behind the facts
                await asyncio.sleep(0.01)
        appended = await client.xlen(STREAM)
        assert appended in (4, 5)  # 5 where the last intent came before the others were appended again
        await asyncio.sleep(1.0)
        assert await client.xlen(STREAM) == appended  # once
    await dies.close()
    log = open_call_log(postgres_url, ingest=private_redis.url)
    await log.start()
    assert [row.intent.id for row in await log.rows(session.id)] == [intent.id for intent in intents]
    assert [(await log.request(intent.id)).fixed for intent in intents] == [request.fixed] * 3
    await log.close()


async def test_what_waits_for_postgres_is_appended_again_to_a_redis_that_was_emptied_while_it_was_away(
    private_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltap.calllog.redis.RETRY_S", 0.02)
    writer = IngestWriter(private_redis.url, AwayStore())
    await writer.start()
    session = a_session()
    intents = [an_intent(session) for _ in range(3)]
    for fact in (session, *intents):
        await writer.write([encode_fact(fact)])
    async with Redis.from_url(private_redis.url) as operator, asyncio.timeout(30):
        assert await operator.xlen(STREAM) == 4
        await operator.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable):
            await writer.write([encode_fact(an_intent(session))])
        assert writer.blind
        await operator.flushall()
        await operator.config_set("maxmemory", 0)
        while writer.blind:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await operator.xlen(STREAM) == 4
        await asyncio.sleep(0.3)
        assert await operator.xlen(STREAM) == 4, "once"
    await writer.close()


async def test_a_redis_of_another_store_is_refused_at_start(
    postgres_server_url: str, postgres_url: str, private_redis: Any
):
    """On one server, too; whoever is no superuser can tell stores apart."""
    one = open_call_log(postgres_url, ingest=private_redis.url)
    await one.start()
    server = await asyncpg.connect(postgres_server_url)
    await server.execute("CREATE ROLE a_store LOGIN")
    await server.execute("CREATE DATABASE a_store OWNER a_store")
    url = f"postgresql://a_store@{postgres_server_url.rsplit('@', 1)[-1].rsplit('/', 1)[0]}/a_store"
    other = open_call_log(url, ingest=private_redis.url)
    with pytest.raises(ConfigError, match=f"another store.*DEL {OWNER}"):
        await other.start()
    await one.close()
    async with Redis.from_url(private_redis.url) as client:
        await client.delete(OWNER)
    other = open_call_log(url, ingest=private_redis.url)
    await other.start()
    await other.close()
    await server.execute("DROP DATABASE a_store WITH (FORCE)")
    await server.execute("DROP ROLE a_store")
    await server.close()
