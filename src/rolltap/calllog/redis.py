"""A Redis stream before the store: facts are durable when Redis has fsynced them, and reach the store in batches.

`write` appends a group to the stream as one entry; with `appendfsync always` Redis answers after its fsync. The proxy
holds what it appended in memory. `PAUSE_S` later it writes that to the store, many groups in one transaction, and
deletes the entries. So a proxy reads nothing back, and it does not matter to it whether Redis still has its data: facts
are lost only if Redis loses them and the proxy dies within that pause.

The stream itself is read for proxies that died. Each proxy looks every `SWEEP_S` for entries that old, writes them to
the store, where writing twice is harmless, and deletes them; a lock in Redis keeps peers from doing so at once. A proxy
that starts sweeps everything first. A reader who waits for a peer longer than `PATIENCE_S` sweeps, too.

While Redis can't be reached, facts go to the store directly, after those that are held.

A fact that the store refuses (another one is there under its id) can't be told to its appender any more: it is logged
as an error and kept in the stream `rolltap:refused`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from rolltap.calllog.fact_codec import EncodedFact, pack_fact, unpack_fact
from rolltap.calllog.writing import GroupWriter, SpoolState, known_parts
from rolltap.crash import crash_point
from rolltap.errors import ConfigError, RecordCorrupt, StoreUnavailable

log = logging.getLogger("rolltap.store")

STREAM = "rolltap:calls"
REFUSED = "rolltap:refused"
SWEEPER = "rolltap:sweeper"

FIELD = b"facts"
"""The one field of an entry: msgpack of a list of packed facts."""

PAUSE_S = 0.02
"""How long facts are held for others to go to the store with them; a reader ends it."""

ENTRY_BYTES = 8 << 20
"""A group with more bytes becomes several entries."""

BATCH = 2000
SWEPT_ENTRIES = 20
SWEEP_S = 10.0
PATIENCE_S = 1.0
POLL_S = 0.02
SWEEPER_MS = 2000
"""When the lock of a sweeper that died ends. A longer sweep may get company, which only costs time."""

RETRY_S = 0.5
CATCH_UP_S = 10.0
TIMEOUT_S = 5.0
OLDEST_VERSION = (6, 2)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])


class IngestWriter:
    """A `GroupWriter` before another one. See the module."""

    def __init__(self, url: str, store: GroupWriter, *, sweep_s: float = SWEEP_S) -> None:
        self._url = url
        self._store = store
        self._sweep_s = sweep_s
        self._redis: Redis = Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        # Groups with the ids of their entries, oldest first. Ids come again where Redis has lost its data.
        self._held: deque[tuple[Sequence[bytes], Sequence[EncodedFact]]] = deque()
        self._known_parts = known_parts()
        self._away = False
        self._closing = False
        self._filled = asyncio.Event()
        self._draining = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(len(facts) for _, facts in self._held) + self._store.waiting

    @property
    def spool(self) -> SpoolState | None:
        return self._store.spool

    async def start(self) -> None:
        await self._store.start()
        try:
            await self._check()
            await self._until_moved(0.0)
        except RedisError as error:
            raise StoreUnavailable(f"{self._url} can't be used: {error}") from error
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Writes what this process holds; what it can't write stays in the stream for its peers, or the next start."""
        self._closing = True  # redis-py can swallow a cancellation, so the loop looks at this as well
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        with suppress(StoreUnavailable):
            await self._drain()
        await self._redis.aclose()
        await self._store.close()

    async def _check(self) -> None:
        """Refuses a Redis that can lose what it acknowledged."""
        info: dict[str, Any] = await self._redis.info()
        version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
        if version < OLDEST_VERSION:
            raise ConfigError(f"{self._url}: Redis {info['redis_version']} is too old; 6.2 or later is needed")
        required = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
        try:
            settings = await self._redis.config_get(*required)
        except ResponseError as error:
            log.warning("%s hides its settings (%s): make sure of %s", self._url, error, required)
            return
        wrong = {name: value for name, value in required.items() if settings.get(name) != value}
        if wrong:
            orders = "; ".join(f"CONFIG SET {name} {value}" for name, value in wrong.items())
            raise ConfigError(f"{self._url} can lose acknowledged calls; set this in redis.conf or by: {orders}")
        if info.get("aof_last_write_status") != "ok":
            raise ConfigError(f"{self._url} can't write its append-only file; see its log")

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        if not facts:
            return
        if self._away or not await self._append(facts):
            await self._drain()  # first: a call may go on from one of these
            await self._store.write(facts)

    async def _append(self, facts: Sequence[EncodedFact]) -> bool:
        """Whether Redis has them all."""
        pipeline = self._redis.pipeline(transaction=False)
        for entry in _entries([pack_fact(fact, self._known_parts) for fact in facts]):
            pipeline.xadd(STREAM, {FIELD: entry})
        try:
            ids = await pipeline.execute()
        except (RedisError, OSError) as error:
            log.warning("Redis takes no calls, they go to the store: %s", error)
            self._away = True
            self._filled.set()
            return False
        crash_point("ingest.appended")
        self._known_parts.update(
            (digest, None) for fact in facts for digest in fact.parts if digest not in self._known_parts
        )
        self._held.append((ids, facts))
        self._filled.set()
        return True

    async def _run(self) -> None:
        """Writes what is held, for as long as this runs; now and then what dead proxies left."""
        sweep_at = time.monotonic() + self._sweep_s
        while not self._closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, sweep_at - time.monotonic())):
                    await self._filled.wait()
            self._filled.clear()
            await asyncio.sleep(PAUSE_S)
            try:
                if self._away:
                    await self._redis.ping()
                    self._away = False
                await self._drain()
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + self._sweep_s
                    await self._sweep(await self._old())
            except (StoreUnavailable, RedisError, OSError):
                self._filled.set()
                await asyncio.sleep(RETRY_S)

    async def _drain(self) -> None:
        """Writes what is held to the store, in order."""
        async with self._draining:
            while self._held:
                count = 0
                entry_ids: list[bytes] = []
                facts: list[EncodedFact] = []
                for ids, group in self._held:
                    count += 1
                    entry_ids += ids
                    facts += group
                    if len(facts) >= BATCH:
                        break
                await self._move(facts, entry_ids)
                for _ in range(count):
                    self._held.popleft()

    async def _move(self, facts: Sequence[EncodedFact], ids: Sequence[bytes]) -> None:
        """Writes the facts of these entries to the store and deletes the entries.

        If Redis can't be reached, the entries stay there: they are swept later, which changes nothing in the store.
        """
        await self._store.write(facts)
        crash_point("ingest.written")
        with suppress(RedisError, OSError):
            for fact in facts:
                if fact.failure is not None:
                    await self._refuse(pack_fact(fact), str(fact.failure))
            if not self._away:
                await self._redis.xdel(STREAM, *ids)

    async def _refuse(self, data: bytes, reason: str) -> None:
        log.error("a fact of the ingest stream was refused, and is kept in %s: %s", REFUSED, reason)
        await self._redis.xadd(REFUSED, {"f": data, "reason": reason})

    async def _sweep(self, last: bytes) -> None:
        """Moves the entries up to `last` into the store, whoever appended them, unless a peer does so now."""
        if not await self._redis.set(SWEEPER, b"", nx=True, px=SWEEPER_MS):
            return
        while batch := await self._range(last, SWEPT_ENTRIES):
            facts: list[EncodedFact] = []
            for _, entry in batch:
                for data in _packed_facts(entry):
                    try:
                        facts.append(unpack_fact(data))
                    except RecordCorrupt as error:
                        await self._refuse(data, str(error))
            await self._move(facts, [entry_id for entry_id, _ in batch])
        await self._redis.delete(SWEEPER)

    async def _range(self, last: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """The stream's first entries, up to the one with id `last`: ids and packed facts."""
        entries: Any = await self._redis.xrange(STREAM, max=last, count=count)
        return [(entry_id, fields.get(FIELD, b"")) for entry_id, fields in entries]

    async def _newest(self) -> bytes | None:
        """The id of the stream's last entry."""
        entries: Any = await self._redis.xrevrange(STREAM, count=1)
        return entries[0][0] if entries else None

    async def _old(self) -> bytes:
        """The greatest id of an entry that is `SWEEP_S` old, by Redis's clock."""
        seconds, microseconds = await self._redis.time()
        return str(int(1000 * (seconds - self._sweep_s) + microseconds / 1000)).encode()

    async def settled(self) -> None:
        """Waits until the store has everything that any proxy had appended before."""
        await self._drain()
        if not self._away:
            try:
                async with asyncio.timeout(CATCH_UP_S):
                    await self._until_moved(PATIENCE_S)
            except TimeoutError:
                raise StoreUnavailable("the store is catching up with the ingest stream", retry_after=1) from None
            except (RedisError, OSError) as error:
                log.warning("Redis can't be asked for the calls of other proxies: %s", error)
        await self._store.settled()

    async def _until_moved(self, patience_s: float) -> None:
        """Returns when all entries of now are in the store; from `patience_s` on this process helps to move them."""
        last, sweep_at = await self._newest(), time.monotonic() + patience_s
        while last is not None and await self._range(last, 1):
            if time.monotonic() >= sweep_at:
                await self._sweep(last)
            await asyncio.sleep(POLL_S)


def _entries(facts: Sequence[bytes]) -> list[bytes]:
    """The packed facts as entries of up to about `ENTRY_BYTES`."""
    groups: list[list[bytes]] = [[]]
    size = 0
    for fact in facts:
        if size > ENTRY_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(fact)
        size += len(fact)
    return [_encoder.encode(group) for group in groups]


def _packed_facts(entry: bytes) -> list[bytes]:
    try:
        return _decoder.decode(entry)
    except msgspec.MsgspecError:
        return [entry]  # not a fact: it is refused
