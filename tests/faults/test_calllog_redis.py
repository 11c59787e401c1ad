"""The ingest stream: Redis killed, flushed or misconfigured, Postgres away, proxies that die."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop
from redis.asyncio import Redis

from rolltap.calllog.codec import EncodedFact, encode_fact
from rolltap.calllog.database import Database
from rolltap.calllog.facts import Fact, LogCondition, RequestParts
from rolltap.calllog.redis import DURABLE, OWNER, STREAM, IngestWriter
from rolltap.calllog.schema import call_intents
from rolltap.calllog.spool import Spool, SpoolWriter
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.errors import ConfigError, StoreUnavailable
from rolltap.types import Outcome

from ..unit.calllog.facts import a_completion, a_session, an_intent
from .load import DRAINED_WITHIN_S, Load, emptied
from .relay import relayed

UNSAFE = {"appendonly": "no", "appendfsync": "everysec", "maxmemory-policy": "allkeys-lru"}


async def test_redis_killed_and_started_again_under_load_loses_nothing(postgres_url: str, private_redis: Any):
    log = open_call_log(postgres_url, ingest=private_redis.url)
    await log.start()
    session = a_session()
    await log.open_session(session)
    load = Load(log, session)
    load.start(8)
    for _ in range(3):
        await load.reach(200)
        await asyncio.to_thread(private_redis.kill)
        await load.reach(100)
        await asyncio.to_thread(private_redis.start)
    await load.reach(200)
    await load.end()
    assert await emptied(log) < DRAINED_WITHIN_S
    await load.check()
    assert load.refused == 0
    await log.close()


async def test_redis_flushed_under_load_loses_nothing(postgres_url: str, private_redis: Any):
    log = open_call_log(postgres_url, ingest=private_redis.url)
    await log.start()
    session = a_session()
    await log.open_session(session)
    load = Load(log, session)
    load.start(8)
    vandal = Redis.from_url(private_redis.url)
    for _ in range(5):
        await load.reach(100)
        await vandal.flushall()
    await load.reach(100)
    await load.end()
    assert await emptied(log) < DRAINED_WITHIN_S
    await load.check()
    await vandal.aclose()
    await log.close()


@pytest.mark.parametrize("kind", ["a replica", "another store's", *UNSAFE])
async def test_a_redis_that_answers_and_is_the_wrong_one_is_passed_by_until_it_is_right_again(
    postgres_url: str, private_redis: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
):
    monkeypatch.setattr("rolltap.calllog.redis.RETRY_S", 0.02)
    database = Database(postgres_url)
    log = SqlCallLog(
        database,
        wrap=lambda direct: IngestWriter(private_redis.url, direct, store_id=database.identity, sweep_s=0.05),
    )
    await log.start()
    session = a_session()
    await log.open_session(session)
    assert await emptied(log) < DRAINED_WITHIN_S
    operator = Redis.from_url(private_redis.url)
    owner = await operator.get(OWNER)
    if kind == "a replica":
        await operator.execute_command("REPLICAOF", "127.0.0.1", "1")
    elif kind in UNSAFE:
        await operator.config_set(kind, UNSAFE[kind])
    else:
        await operator.set(OWNER, "another")
    load = Load(log, session)
    load.start(2)
    await load.reach(200)
    while not log._writer._away:  # type: ignore[attr-defined]  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    left_before = await operator.xlen(STREAM)
    await asyncio.sleep(0.3)
    assert caplog.text.count("Redis is unavailable") == 1, "it is not taken for right because it answers"
    assert await operator.xlen(STREAM) == left_before
    if kind == "a replica":
        await operator.execute_command("REPLICAOF", "NO", "ONE")
    elif kind in UNSAFE:
        await operator.config_set(kind, DURABLE[kind])
    else:
        assert owner is not None
        await operator.set(OWNER, owner)
    while log._writer._away:  # type: ignore[attr-defined]  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await load.end()
    await load.check()
    assert load.refused == 0
    await operator.aclose()
    await log.close()


async def test_calls_are_acknowledged_while_postgres_is_away(private_postgres: Any, private_redis: Any):
    log = open_call_log(private_postgres.url(), ingest=private_redis.url)
    await log.start()
    session = a_session()
    await log.open_session(session)
    load = Load(log, session)
    load.start(4)
    await load.reach(100)
    await asyncio.to_thread(private_postgres.stop, "immediate")
    await load.reach(100)
    assert await log.session_by_key(session.key_hash) == session
    await asyncio.to_thread(private_postgres.start)
    await load.end()
    assert await emptied(log) < DRAINED_WITHIN_S
    await load.check()
    assert load.refused == 0
    await log.close()


async def test_calls_go_to_postgres_while_redis_hangs(postgres_url: str, private_redis: Any, tmp_path: Path):
    log = open_call_log(postgres_url, ingest=private_redis.url, spools=[tmp_path / "spool"])
    await log.start()
    session = a_session()
    await log.open_session(session)
    load = Load(log, session)
    load.start(4)
    await load.reach(50)
    private_redis.signal(signal.SIGSTOP)
    await load.reach(50)
    assert await log.condition() == LogCondition(store=True, spool=True)
    await load.end()
    assert await emptied(log) < DRAINED_WITHIN_S
    await load.check()
    private_redis.signal(signal.SIGCONT)
    load.start(4)
    async with Redis.from_url(private_redis.url) as client:
        while not await client.xlen(STREAM):  # noqa: ASYNC110 - the log finds out by itself
            await asyncio.sleep(0.01)
    await load.end()
    await load.check()
    assert load.refused == 0
    await log.close()


async def test_a_postgres_connection_that_vanishes_without_a_word_is_given_up(
    postgres_url: str, private_redis: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rolltap.calllog.redis.STORE_WITHIN_S", 0.5)
    server = urlsplit(postgres_url)
    assert server.hostname
    assert server.port
    async with relayed(server.hostname, server.port) as relay:
        url = postgres_url.replace(f":{server.port}/", f":{relay.own_port}/")
        log = open_call_log(url, ingest=private_redis.url)
        await log.start()
        session = a_session()
        await log.open_session(session)
        assert not await log.rows(session.id)
        relay.vanish()
        intent = an_intent(session)
        await log.append_intent(intent)
        await log.append_completion(a_completion(intent.id))
        assert await emptied(log) < DRAINED_WITHIN_S
        (row,) = await log.rows(session.id)
        assert row.call().outcome is Outcome.COMPLETED
        await relay.end()
        await log.close()


async def test_a_reader_does_not_wait_for_ever_for_a_store_that_hangs(
    private_redis: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rolltap.calllog.redis.CATCH_UP_S", 0.2)
    writer = IngestWriter(private_redis.url, HangingStore())
    await writer.start()
    await writer.write([encode_fact(an_intent("session"))])
    with pytest.raises(StoreUnavailable, match="catching up"):
        await writer.settled()
    monkeypatch.setattr("rolltap.calllog.redis.STORE_WITHIN_S", 0.01)
    await writer.close()


async def test_what_is_held_for_a_store_that_is_away_has_a_bound(
    private_redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rolltap.calllog.redis.HELD_BYTES", 20_000)
    store = RememberingStore()
    store.away = True
    ingest = IngestWriter(private_redis.url, store)
    writer = SpoolWriter(ingest, Spool(tmp_path / "spool", 1_000_000), probe_s=0.05)
    await writer.start()
    intents = [an_intent("session") for _ in range(100)]
    for intent in intents:
        fact = encode_fact(intent)
        await writer.write([fact])
        assert fact.failure is None
    assert 0 < ingest.waiting < 30
    assert writer.spool.in_use
    store.away = False
    await asyncio.wait_for(writer.settled(), 20)
    assert store.intents == [intent.id for intent in intents]
    await writer.close()


async def test_what_is_in_the_stream_is_seen_by_other_proxies_and_what_is_in_memory_is_not(
    private_redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the ends of rollouts would wait for every busy proxy. What stays in the stream, they wait for."""
    monkeypatch.setattr("rolltap.calllog.redis.IN_STREAM_S", 60)
    store = RememberingStore()
    store.away = True
    writer = SpoolWriter(IngestWriter(private_redis.url, store), Spool(tmp_path / "spool", 1_000_000), probe_s=0.05)
    await writer.start()
    await writer.write([encode_fact(an_intent("session"))])
    assert (writer.waiting, writer.unseen, writer.blind) == (1, 0, False)
    monkeypatch.setattr("rolltap.calllog.redis.IN_STREAM_S", 0)
    assert (writer.waiting, writer.unseen, writer.blind) == (1, 1, False)
    private_redis.signal(signal.SIGKILL)
    await writer.write([encode_fact(an_intent("session"))])
    assert (writer.waiting, writer.unseen, writer.blind) == (2, 2, True)
    store.away = False
    await asyncio.wait_for(writer.settled(), 20)
    assert (writer.waiting, writer.unseen) == (0, 0)
    await writer.close()


async def test_who_ends_with_facts_in_the_stream_only_is_not_forgotten(
    postgres_url: str, private_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of Postgres's that is full takes no call, and yet the end of a process. Peers may not reach Redis then."""
    peer = open_call_log(postgres_url)
    await peer.start()
    await peer.abort_orphans(["peer"], at=1.0)
    for name, is_full, left in (("well", False, []), ("in bad times", True, ["in bad times"])):
        log = open_call_log(postgres_url, ingest=private_redis.url)
        await log.start()
        await log.abort_orphans([name], at=1.0)
        session = a_session()
        await log.open_session(session)
        await log._registry._beat_once({})
        with monkeypatch.context() as patched:
            if is_full:
                patched.setattr(log._tables, "write", full)
            intent = an_intent(session, process=name)
            await log.append_intent(intent)
            await log.append_completion(a_completion(intent.id))
            await log.close()
        assert await peer._registry.behind(float("-inf")) == left
    await peer.close()


async def full(facts: Sequence[EncodedFact]) -> None:
    raise StoreUnavailable("could not extend file: No space left on device")


async def test_a_store_that_is_slow_gets_smaller_batches(private_redis: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rolltap.calllog.redis.STORE_WITHIN_S", 0.2)
    store = RememberingStore()
    store.away, store.slow_s = True, 0.002
    writer = IngestWriter(private_redis.url, store)
    await writer.start()
    intents = [an_intent("session") for _ in range(500)]
    await writer.write([encode_fact(intent) for intent in intents])
    store.away = False
    assert await emptied(writer) < DRAINED_WITHIN_S
    assert store.intents == [intent.id for intent in intents]
    await writer.close()


class AwayStore:
    """A store that never answers a write."""

    waiting = 0
    unseen = 0
    blind = False
    refused = 0
    spool = None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def settled(self) -> None: ...

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        raise StoreUnavailable("away")


class RememberingStore(AwayStore):
    """A store that keeps the intents in the order in which they came, and can be away, or slow with each fact."""

    def __init__(self) -> None:
        self.intents: list[str] = []
        self.away = False
        self.slow_s = 0.0

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        if self.away:
            raise StoreUnavailable("away")
        await asyncio.sleep(self.slow_s * len(facts))
        self.intents += [fact.row[0] for fact in facts if fact.table is call_intents]


class HangingStore(AwayStore):
    """A store that takes a write and says no more."""

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("fault", ["killed", "flushed"])
async def test_a_call_never_comes_to_the_store_before_its_parent(
    private_redis: Any, monkeypatch: pytest.MonkeyPatch, fault: str
):
    monkeypatch.setattr("rolltap.calllog.redis.PAUSE_S", 60.0)
    store = RememberingStore()
    writer = IngestWriter(private_redis.url, store)
    await writer.start()
    parent = an_intent("session")
    child = an_intent("session", parent_id=parent.id)
    await writer.write([encode_fact(parent)])  # is held: the drain pauses
    assert store.intents == []
    if fault == "killed":
        await asyncio.to_thread(private_redis.kill)
    else:
        async with Redis.from_url(private_redis.url) as vandal:
            await vandal.flushall()
    await writer.write([encode_fact(child)])
    await writer.settled()
    assert store.intents == [parent.id, child.id]
    await writer.close()


async def test_entries_before_and_after_a_flush_may_have_one_id(private_redis: Any, monkeypatch: pytest.MonkeyPatch):
    """A stream that is made again counts anew: within a millisecond its entries are called what the lost ones were."""
    monkeypatch.setattr("rolltap.calllog.redis.PAUSE_S", 60.0)
    store = RememberingStore()
    writer = IngestWriter(private_redis.url, store)
    await writer.start()
    intents = [an_intent("session") for _ in range(2)]
    async with Redis.from_url(private_redis.url) as vandal:
        for intent in intents:
            await vandal.flushall()
            await vandal.xadd(STREAM, {"any": "thing"}, id="9999999999999-0")  # the clock goes on from here
            await vandal.xdel(STREAM, "9999999999999-0")
            await writer.write([encode_fact(intent)])
            assert await vandal.xrange(STREAM, "9999999999999-1", "9999999999999-1")
    await writer.settled()
    assert store.intents == [intent.id for intent in intents]
    await writer.close()


async def test_what_a_dead_proxy_left_in_the_stream_is_drained_by_the_next(postgres_url: str, private_redis: Any):
    dead = IngestWriter(private_redis.url, AwayStore())
    await dead.start()
    session = a_session()
    intent = an_intent(session)
    facts: list[Fact] = [session, intent, a_completion(intent.id)]
    for fact in facts:
        await dead.write([encode_fact(fact)])
    await dead.close()
    log = open_call_log(postgres_url, ingest=private_redis.url)
    await log.start()
    assert await log.session(session.id) == session
    assert await log.abort_orphans([], at=1.0) == 0
    (row,) = await log.rows(session.id)
    assert row.call().outcome is Outcome.COMPLETED
    await log.close()
    client = Redis.from_url(private_redis.url)
    assert await client.xlen(STREAM) == 0
    await client.aclose()


async def test_a_start_is_not_kept_up_by_a_peer_that_died_while_it_swept(postgres_url: str, private_redis: Any):
    dead = IngestWriter(private_redis.url, AwayStore())
    await dead.start()
    session = a_session()
    await dead.write([encode_fact(session)])
    sweeper = IngestWriter(private_redis.url, AwayStore())
    with pytest.raises(StoreUnavailable):
        await sweeper.start()  # the sweepers' lock is held from here on
    await sweeper.close()
    await dead.close()
    log = open_call_log(postgres_url, ingest=private_redis.url)
    await log.start()
    assert await log.session(session.id) == session
    await log.close()


@pytest.mark.parametrize("helper", ["a reader", "the sweep"])
async def test_peers_write_what_a_proxy_appended_and_never_wrote(postgres_url: str, private_redis: Any, helper: str):
    stuck = IngestWriter(private_redis.url, AwayStore())
    await stuck.start()
    sweep_s = 0.2 if helper == "the sweep" else 60.0
    log = SqlCallLog(Database(postgres_url), wrap=lambda store: IngestWriter(private_redis.url, store, sweep_s=sweep_s))
    await log.start()
    session = a_session()
    intents = [an_intent(session) for _ in range(40)]
    await log.open_session(session)
    for number, intent in enumerate(intents):
        if number % 2:
            await stuck.write([encode_fact(intent)])
        else:
            await log.append_intent(intent)
    if helper == "the sweep":
        async with Redis.from_url(private_redis.url) as client:
            while await client.xlen(STREAM):  # noqa: ASYNC110 - the log's own task sweeps
                await asyncio.sleep(0.01)
    assert [row.intent.id for row in await log.rows(session.id)] == [intent.id for intent in intents]
    await stuck.close()
    await log.close()


async def test_a_large_request_part_goes_through_the_stream_once(postgres_url: str, private_redis: Any):
    """And is there for the calls after it, whoever writes them to the store."""
    sizes: list[int] = []
    stuck = IngestWriter(private_redis.url, AwayStore())
    await stuck.start()
    session = a_session()
    request = RequestParts(b"", (), 0, {"tools": random.Random(0).randbytes(100_000)})
    intents = [an_intent(session, request=request) for _ in range(2)]
    async with Redis.from_url(private_redis.url) as client:
        for fact in (session, *intents):
            await stuck.write([encode_fact(fact)])
            sizes.append((await client.memory_usage(STREAM)) or 0)
    assert sizes[1] - sizes[0] > 100_000 > 20 * (sizes[2] - sizes[1])
    log = open_call_log(postgres_url, ingest=private_redis.url)
    await log.start()
    assert [(await log.request(intent.id)).fixed for intent in intents] == [request.fixed] * 2
    await stuck.close()
    await log.close()


async def test_a_full_redis_is_passed_by(postgres_url: str, private_redis: Any):
    log = open_call_log(postgres_url, ingest=private_redis.url)
    await log.start()
    session = a_session()
    await log.open_session(session)
    client = Redis.from_url(private_redis.url)
    await client.config_set("maxmemory", 1)
    load = Load(log, session)
    load.start(2)
    await load.reach(20)
    await load.end()
    await load.check()
    assert load.refused == 0
    await client.aclose()
    await log.close()


@pytest.mark.parametrize(
    ("setting", "value"), [("appendfsync", "everysec"), ("appendonly", "no"), ("maxmemory-policy", "allkeys-lru")]
)
async def test_a_redis_that_can_lose_calls_is_refused_at_start(
    postgres_url: str, private_redis: Any, setting: str, value: str
):
    client = Redis.from_url(private_redis.url)
    await client.config_set(setting, value)
    await client.aclose()
    log = open_call_log(postgres_url, ingest=private_redis.url.replace("://", "://:pass-word@"))
    with pytest.raises(ConfigError, match=f"CONFIG SET {setting}") as refused:
        await log.start()
    assert "pass-word" not in str(refused.value)


async def test_a_redis_that_can_not_be_reached_stops_the_start(postgres_url: str):
    log = open_call_log(postgres_url, ingest="redis://:pass-word@127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1") as away:
        await log.start()
    assert "pass-word" not in str(away.value)


@pytest.mark.parametrize(
    ("url", "ingest", "words"),
    [
        ("sqlite:///x.db", "redis://host", "works with a Postgres store"),
        ("postgresql://h/d", "kafka://host", "not a Redis URL"),
    ],
)
def test_an_ingest_that_makes_no_sense_is_refused(url: str, ingest: str, words: str):
    with pytest.raises(ConfigError, match=words):
        open_call_log(url, ingest=ingest)


def test_a_write_to_a_connection_that_has_ended_is_an_outage(
    postgres_url: str, private_redis: Any, caplog: pytest.LogCaptureFixture
):
    """Where a peer has ended a connection, uvloop answers the next write with a `RuntimeError`, no `OSError`."""

    async def read_behind_the_end() -> None:
        log = open_call_log(postgres_url, ingest=private_redis.url)
        await log.start()
        session = a_session()
        await log.open_session(session)
        await log.rows(session.id)
        writer: Any = log
        while not isinstance(writer, IngestWriter):
            writer = writer._writer if writer is log else writer._store
        connections: Any = writer._redis.connection_pool._available_connections
        assert connections
        for connection in connections:
            connection._writer.transport.abort()
        await log.rows(session.id)
        await log.close()

    uvloop.run(read_behind_the_end())
    assert "the handler is closed" in caplog.text
