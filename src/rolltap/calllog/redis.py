"""A Redis stream before the store: facts are durable when Redis has fsynced them, and drained into it in batches.

`write` appends a group to the stream in one round trip; with `appendfsync always` Redis answers after its fsync. Every
proxy is a consumer of one group: it takes batches off the stream, writes them to the store (where writing twice is
harmless) and deletes them. What a consumer took and did not delete within `CLAIM_S` is claimed by its peers.

What Redis forgets is not lost either. Beside the stream stands its incarnation, a random value that goes when the data
goes. A proxy holds what it appended, and under which incarnation, until it sees that incarnation without the entry: it
was drained. Under another one the entry was lost, and the proxy writes it to the store itself; so it does while Redis
can't be reached. Facts are lost only if Redis loses its data and the proxy dies within `LOOK_S` of it.

A fact that the store refuses at the drain (another one is there under its id) can't be told to its appender any more:
it is logged as an error and kept in the stream `rolltap:refused`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from rolltap.calllog.commit import Entry
from rolltap.calllog.fact_codec import pack_fact, unpack_fact
from rolltap.calllog.facts import Fact, name_of
from rolltap.calllog.writing import GroupWriter, SpoolState
from rolltap.crash import crash_point
from rolltap.errors import ConfigError, RecordCorrupt, StoreUnavailable
from rolltap.ids import new_id

log = logging.getLogger("rolltap.store")

STREAM = "rolltap:calls"
REFUSED = "rolltap:refused"
INCARNATION = "rolltap:incarnation"
GROUP = "rolltap"

OWN, NEW = "0", ">"
"""Positions in the stream: what this consumer took and did not delete, and what nobody took."""

BATCH = 500
BLOCK_MS = 1000
PAUSE_S = 0.02
"""Between batches, so that they are worth their transaction; a reader who waits for the stream ends it."""

CLAIM_S = 10.0
LOOK_S = 0.2
RETRY_S = 0.5
CATCH_UP_S = 10.0
TIMEOUT_S = 5.0
OLDEST_VERSION = (6, 2)


class IngestWriter:
    """A `GroupWriter` before another one. See the module."""

    def __init__(self, url: str, store: GroupWriter, *, look_s: float = LOOK_S, claim_s: float = CLAIM_S) -> None:
        self._url = url
        self._store = store
        self._look_s = look_s
        self._claim_s = claim_s
        self._redis: Redis = Redis.from_url(
            url, socket_timeout=TIMEOUT_S + BLOCK_MS / 1000, socket_connect_timeout=TIMEOUT_S
        )
        self._consumer = new_id()
        self._held: dict[tuple[bytes | None, bytes], Fact] = {}
        self._away = False
        self._closing = False
        self._drained = asyncio.Event()
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def waiting(self) -> int:
        return len(self._held) + self._store.waiting

    @property
    def spool(self) -> SpoolState | None:
        return self._store.spool

    async def start(self) -> None:
        await self._store.start()
        try:
            await self._check()
            await self._join()
            await self._claim(idle_s=0)
        except RedisError as error:
            raise StoreUnavailable(f"{self._url} can't be used: {error}") from error
        self._tasks = [asyncio.create_task(loop()) for loop in (self._drain, self._look)]

    async def close(self) -> None:
        """Writes what this process holds; what it can't write stays in the stream for its peers, or the next start."""
        self._closing = True  # redis-py can swallow a cancellation, so the loops look at this as well
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        held = list(self._held)
        with suppress(StoreUnavailable, RedisError, OSError):
            await self._write_held(held)
            await self._delete([entry_id for _, entry_id in held])
        await self._redis.aclose()
        await self._store.close()

    async def _check(self) -> None:
        """Refuses a Redis that can lose what it acknowledged."""
        info: dict[str, Any] = await self._redis.info()
        version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
        if version < OLDEST_VERSION:
            raise ConfigError(f"{self._url}: Redis {info['redis_version']} is too old; 6.2 or later is needed")
        wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
        try:
            found = await self._redis.config_get(*wanted)
        except ResponseError as error:
            log.warning("%s hides its settings (%s): make sure of %s", self._url, error, wanted)
            return
        wrong = {name: value for name, value in wanted.items() if found.get(name) != value}
        if wrong:
            orders = "; ".join(f"CONFIG SET {name} {value}" for name, value in wrong.items())
            raise ConfigError(f"{self._url} can lose acknowledged calls; give it in redis.conf or by: {orders}")
        if info.get("aof_last_write_status") != "ok":
            raise ConfigError(f"{self._url} can't write its append-only file; see its log")

    async def _join(self) -> None:
        """Makes the stream's incarnation and its consumer group, where they are missing."""
        await self._redis.set(INCARNATION, secrets.token_hex(16), nx=True)
        with suppress(ResponseError):
            await self._redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)

    async def write(self, entries: Sequence[Entry[Fact]]) -> None:
        packed: list[tuple[Fact, bytes]] = []
        for entry in entries:
            try:
                packed.append((entry.value, pack_fact(entry.value)))
            except (TypeError, ValueError) as error:
                entry.failure = RecordCorrupt(f"{name_of(entry.value)} can't be stored: {error}")
        if not packed:
            return
        if self._away or not await self._append(packed):
            await self._write_held(list(self._held))  # first: a call may go on from one of these
            await self._store.write([entry for entry in entries if entry.failure is None])

    async def _append(self, packed: Sequence[tuple[Fact, bytes]]) -> bool:
        """Whether Redis has them all."""
        pipeline = self._redis.pipeline()
        pipeline.get(INCARNATION)
        for _, data in packed:
            pipeline.xadd(STREAM, {"f": data})
        try:
            incarnation, *ids = await pipeline.execute()
        except (RedisError, OSError) as error:
            log.warning("Redis takes no calls, they go to the store: %s", error)
            self._away = True
            return False
        crash_point("ingest.appended")
        for entry_id, (fact, _) in zip(ids, packed, strict=True):
            self._held[incarnation, entry_id] = fact
        return True

    async def _drain(self) -> None:
        """Takes what is new off the stream, for as long as this runs; now and then what others left lying."""
        claim_at, position = 0.0, OWN
        while not self._closing:
            try:
                async with self._there():
                    if time.monotonic() >= claim_at:
                        claim_at = time.monotonic() + self._claim_s
                        await self._claim(self._claim_s)
                    found = await self._redis.xreadgroup(
                        GROUP, self._consumer, {STREAM: position}, count=BATCH, block=BLOCK_MS
                    )
                    batch = _entries(found)
                    position = position if batch else NEW
                    await self._move(batch)
                if batch:
                    await self._pause()
            except (StoreUnavailable, RedisError, OSError):
                claim_at, position = 0.0, OWN
                await asyncio.sleep(RETRY_S)

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wanted.wait(), PAUSE_S)
        self._wanted.clear()

    @asynccontextmanager
    async def _there(self) -> AsyncIterator[None]:
        """A stream without the group has been flushed: makes it again."""
        try:
            yield
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            await self._join()

    async def _claim(self, idle_s: float) -> None:
        """Takes over what a consumer (this one included) took and did not delete for so long."""
        start = b"0-0"
        while True:
            start, batch, *_ = await self._redis.xautoclaim(
                STREAM, GROUP, self._consumer, min_idle_time=int(idle_s * 1000), start_id=start, count=BATCH
            )
            if batch:
                await self._move(batch)
            if start == b"0-0":
                return

    async def _move(self, batch: Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]) -> None:
        """Writes a batch to the store and deletes it from the stream. What Redis lost goes first, as it is older."""
        incarnation: Any = await self._redis.get(INCARNATION)
        await self._save_lost(incarnation)
        entries: list[Entry[Fact]] = []
        refused: list[tuple[bytes, str]] = []
        for data in (fields[b"f"] for _, fields in batch if fields):
            try:
                entries.append(Entry(unpack_fact(data)))
            except RecordCorrupt as error:
                refused.append((data, str(error)))
        if entries:
            await self._write_somehow(entries)
        refused += [(pack_fact(entry.value), str(entry.failure)) for entry in entries if entry.failure is not None]
        for data, reason in refused:
            log.error("a fact of the ingest stream was refused, and is kept in %s: %s", REFUSED, reason)
            await self._redis.xadd(REFUSED, {"f": data, "reason": reason})
        crash_point("ingest.written")
        ids = [one for one, _ in batch]
        await self._delete(ids)
        self._drained.set()

    async def _write_somehow(self, entries: Sequence[Entry[Fact]]) -> None:
        """Tries until the store answers; peers that have one claim the batch meanwhile."""
        while True:
            try:
                await self._store.write(entries)
            except StoreUnavailable:
                if self._closing:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _delete(self, ids: Sequence[bytes]) -> None:
        """Takes entries off the stream: they are in the store."""
        if ids:
            pipeline = self._redis.pipeline()
            pipeline.xack(STREAM, GROUP, *ids)
            pipeline.xdel(STREAM, *ids)
            await pipeline.execute()

    async def _look(self) -> None:
        """Lets go of what was drained; writes what Redis lost, or has out of reach, to the store."""
        while not self._closing:
            await asyncio.sleep(self._look_s)
            with suppress(StoreUnavailable):
                await self._look_once()

    async def _look_once(self) -> None:
        held = list(self._held)
        try:
            incarnation, oldest = await self._oldest()
        except (RedisError, OSError):
            await self._write_held(held)
            return
        self._away = False
        await self._save_lost(incarnation)
        for key in held:
            if oldest is None or _order(key[1]) < _order(oldest):
                self._held.pop(key, None)

    async def _save_lost(self, incarnation: bytes | None) -> None:
        """Writes to the store what this process appended under another incarnation than Redis has now."""
        lost = [key for key in self._held if key[0] is None or key[0] != incarnation]
        if lost:
            log.error("Redis lost its data; %d facts go to the store from memory", len(lost))
            await self._write_held(lost)

    async def _oldest(self) -> tuple[bytes | None, bytes | None]:
        """The incarnation, and the id of the oldest entry in the stream."""
        pipeline = self._redis.pipeline()
        pipeline.get(INCARNATION)
        pipeline.xrange(STREAM, count=1)
        incarnation, first = await pipeline.execute()
        return incarnation, first[0][0] if first else None

    async def _write_held(self, keys: Sequence[tuple[bytes | None, bytes]]) -> None:
        entries = [Entry(self._held[key]) for key in keys if key in self._held]
        if entries:
            await self._store.write(entries)
            for key in keys:
                self._held.pop(key, None)

    async def settled(self) -> None:
        """Waits until everything that any proxy had appended before is drained."""
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self._look_once()
                await self._until_drained()
        except TimeoutError:
            raise StoreUnavailable("the store is catching up with the ingest stream", retry_after=1) from None
        except (RedisError, OSError):
            await self._write_held(list(self._held))
        await self._store.settled()

    async def _until_drained(self) -> None:
        last = _order((await self._redis.xinfo_stream(STREAM))["last-generated-id"])
        while True:
            self._drained.clear()
            self._wanted.set()
            _, oldest = await self._oldest()
            if oldest is None or _order(oldest) > last:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), 0.05)


def _order(entry_id: bytes | str) -> tuple[int, int]:
    """A stream id's place: milliseconds, then a count."""
    text = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    milliseconds, _, count = text.partition("-")
    return int(milliseconds), int(count)


def _entries(found: Any) -> list[tuple[bytes, Mapping[bytes, bytes] | None]]:
    """What XREADGROUP answered of the one stream; nothing if it ran into its time limit."""
    return list(found[0][1]) if found else []
