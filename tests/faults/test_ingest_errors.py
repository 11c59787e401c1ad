"""Errors that nobody foresaw, anywhere in the ingest log: told, tried again, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from rolltap.calllog.codec import encode_fact
from rolltap.calllog.redis import STREAM, IngestWriter

from ..unit.calllog.facts import an_intent
from .test_calllog_redis import RememberingStore

ERRORS = {
    "RuntimeError": lambda: RuntimeError("unable to perform operation on <TCPTransport closed=True>"),
    "AttributeError": lambda: AttributeError("'NoneType' object has no attribute 'write'"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "InvalidStateError": lambda: asyncio.InvalidStateError("invalid state"),
    "KeyError": lambda: KeyError("redis_version"),
    "MemoryError": MemoryError,
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
}
PLACES = ("_drain", "_check_redis", "_append_lost", "_set_mark", "_sweep", "_delete", "store.write", "_redis.time")
CONNECTION = ("send_packed_command", "read_response")


def fail(owner: Any, name: str, error: Callable[[], Exception], times: int) -> Callable[[], int]:
    """Makes the next calls of an async method raise. Returns a function that says how many are left."""
    real, left = getattr(owner, name), times

    async def method(*arguments: Any, **more: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise error()
        return await real(*arguments, **more)

    setattr(owner, name, method)
    return lambda: left


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltap.calllog.redis.RETRY_S", 0.01)


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
async def test_an_odd_error_ends_no_writer(
    place: str, error: str, private_redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = RememberingStore()
    writer = IngestWriter(private_redis.url, store, sweep_s=0.05)
    await writer.start()
    owner = {"store": store, "_redis": writer._redis}.get(place.partition(".")[0], writer)
    if place == "_append_lost":
        store.away = True
    left = fail(owner, place.rpartition(".")[2], ERRORS[error], 3)
    acknowledged = []
    while left() or len(acknowledged) < 20:
        intent = an_intent("session")
        await writer.write([encode_fact(intent)])
        acknowledged.append(intent.id)
        await asyncio.sleep(0.002)
    store.away = False
    await until(lambda: not writer.waiting)
    assert list(dict.fromkeys(store.intents)) == acknowledged
    told = [record for record in caplog.records if error in record.getMessage()]
    assert 1 <= len(told) <= 3
    assert all(record.exc_info for record in told)
    await until(lambda: "the ingest log works again" in caplog.text)
    await writer.close()


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", CONNECTION)
async def test_an_odd_error_of_a_connection_is_an_outage_of_redis(
    name: str, error: str, private_redis: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes or reads gets its facts stored, past Redis, which is used again afterwards."""
    store = RememberingStore()
    writer = IngestWriter(private_redis.url, store, sweep_s=0.05)
    await writer.start()
    real: Any = writer._redis.connection_pool.connection_class.__mro__[2]  # redis-py's own
    original, left = getattr(real, name), 5

    async def method(*arguments: Any, **more: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise ERRORS[error]()
        return await original(*arguments, **more)

    monkeypatch.setattr(real, name, method)
    acknowledged = []
    while left or writer._away or len(acknowledged) < 20:
        intent = an_intent("session")
        await writer.write([encode_fact(intent)])
        acknowledged.append(intent.id)
        await writer.settled()
    await until(lambda: not writer.waiting)
    assert list(dict.fromkeys(store.intents)) == acknowledged
    assert f"Redis is unavailable, calls go to the store: {error}" in caplog.text
    assert "the ingest log failed" not in caplog.text
    await writer.close()


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("quick")
async def test_an_odd_error_at_the_end_closes_the_rest_and_leaves_the_facts(
    private_redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = RememberingStore()
    store.away = True
    writer = IngestWriter(private_redis.url, store)
    await writer.start()
    await writer.write([encode_fact(an_intent("session"))])
    closed = asyncio.Event()

    async def close() -> None:
        closed.set()

    store.close = close  # type: ignore[method-assign]
    fail(store, "write", ERRORS["RuntimeError"], 99)
    await writer.close()
    assert closed.is_set()
    assert "1 fact left in" in caplog.text
    async with Redis.from_url(private_redis.url) as redis:
        assert await redis.xlen(STREAM) == 1
