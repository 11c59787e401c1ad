"""The ingest log: a Redis stream before the store. Facts are durable in Redis first and reach the store in batches.

`write` appends a group to the stream as one entry; with `appendfsync always` Redis answers after its fsync. The proxy
also keeps the facts in memory. `PAUSE_S` later it writes them to the store, many groups in one transaction, and deletes
the entries. So a proxy does not read its entries back. Facts are lost only if Redis loses them and the proxy dies
within that pause. While the store is unavailable, the pause lasts until an attempt succeeds; after each failed attempt
the proxy checks whether Redis was emptied, and then appends its facts again.

Entries of dead proxies are swept. Every `SWEEP_S` each proxy looks for entries of that age, writes them to the store
(writing twice is harmless) and deletes them; a lock in Redis prevents sweeps at the same time. A proxy sweeps
everything when it starts, and when a reader has waited for a peer's entries longer than `PATIENCE_S`.

While Redis is unreachable or slower than `REDIS_WITHIN_S`, facts go directly to the store, after those in memory. While
the store is unavailable, about `HELD_BYTES` are kept in memory; further facts are refused, and a spool can take them.

If the store refuses a fact (another one has its id), its appender has already returned. So the fact is logged as an
error and kept in the stream `rolltap:refused`.

A Redis that is not durable, or holds another store's stream, is refused at the start (`check_settings`,
`check_stream_owner`). Every `SWEEP_S`, and when Redis comes back, it is asked again, as it may be another one or have
other settings: while it is wrong, facts go directly to the store.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from rolltap.calllog.codec import EncodedFact, pack_fact, unpack_fact
from rolltap.calllog.writing import IN_STREAM_S, GroupWriter, SpoolState, known_parts
from rolltap.crash import crash_point
from rolltap.decoding import msgpack_decoder
from rolltap.errors import ConfigError, RecordCorrupt, StoreUnavailable
from rolltap.ids import new_id
from rolltap.settings import hide_password
from rolltap.wording import Outage, counted

log = logging.getLogger("rolltap.store")

STREAM = "rolltap:calls"
REFUSED = "rolltap:refused"
SWEEPER = "rolltap:sweeper"

MARK = "rolltap:proxy:"
"""Prefix of a key that each proxy sets. If its key is missing, Redis was emptied."""

MARK_S = 600

FIELD = b"facts"
"""The only field of an entry: msgpack of a list of packed facts."""

PAUSE_S = 0.02
"""Seconds to collect facts before they are written to the store. A reader ends the pause."""

ENTRY_BYTES = 8 << 20
"""A group with more bytes is split into several entries."""

HELD_BYTES = 256 << 20
FACT_BYTES = 1000
"""Estimated bytes of a fact in memory, beside its bytes in the stream."""

BATCH = 2000
SWEPT_ENTRIES = 20
SWEEP_S = 10.0
PATIENCE_S = 1.0
POLL_S = 0.02
SWEEPER_MS = 2000
"""Expiry of the sweep lock, if its holder dies.

If a sweep takes longer, a second one may run too, which is harmless.
"""

RETRY_S = 0.5
CATCH_UP_S = 10.0
TIMEOUT_S = 5.0
REDIS_WITHIN_S = 1.0
"""Timeout for Redis in operations that calls wait for. A slower Redis counts as unavailable."""

STORE_WITHIN_S = 5.0
"""Timeout for the store to write a batch. Then it gets smaller batches, over another connection."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(list[bytes])


@dataclass(slots=True)
class _Entry:
    """An entry of the stream with its facts, kept until the store has them. `size`: bytes in memory."""

    id: bytes
    facts: Sequence[EncodedFact]
    size: int
    at: float  # monotonic


class IngestWriter:
    """A `GroupWriter` that writes to Redis and then to another `GroupWriter`. See the module."""

    def __init__(
        self,
        url: str,
        store: GroupWriter,
        *,
        store_id: Callable[[], Awaitable[str]] | None = None,
        sweep_s: float = SWEEP_S,
    ) -> None:
        """With `store_id`, refuses a Redis that belongs to another store."""
        self._name = hide_password(url)  # in messages
        self._store = store
        self._store_id = store_id
        self._own_id: str | None = None
        self._sweep_s = sweep_s
        self._sweep_at = math.inf
        self._redis: Redis = Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        pool = self._redis.connection_pool
        pool.connection_class = type("Connection", (OddErrors, pool.connection_class), {})
        # The oldest first. No dict by id: Redis reuses ids after it has lost its data.
        self._held: deque[_Entry] = deque()
        self._held_bytes = 0
        self._refused = 0
        self._batch = BATCH
        self._known_parts = known_parts()
        self._mark = MARK + new_id()
        self._away = False
        self._closing = False
        self._filled = asyncio.Event()
        self._outage = Outage(log)
        self._draining = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(len(entry.facts) for entry in self._held) + self._store.waiting

    @property
    def unseen(self) -> int:
        """Other proxies sweep the stream when they read, so its facts are hidden only while Redis is away. A proxy that
        can't read it waits for `IN_STREAM_S`: so those that are in it for longer count, too, and at the end all."""
        before = math.inf if self._away or self._closing else time.monotonic() - IN_STREAM_S
        hidden = takewhile(lambda entry: entry.at < before, self._held)
        return self._store.unseen + sum(len(entry.facts) for entry in hidden)

    @property
    def blind(self) -> bool:
        return self._away

    @property
    def refused(self) -> int:
        return self._refused + self._store.refused

    @property
    def spool(self) -> SpoolState | None:
        return self._store.spool

    async def start(self) -> None:
        await self._store.start()
        try:
            if not await check_settings(self._redis, self._name):
                log.warning("%s does not show its settings: make sure that it has %s", self._name, DURABLE)
            if self._store_id is not None:
                self._own_id = await self._store_id()
                await check_stream_owner(self._redis, self._name, self._own_id)
            await self._set_mark()
            await self._until_moved(0.0)
        except RedisError as error:
            raise StoreUnavailable(f"cannot use {self._name}: {error}") from error
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Writes the facts in memory. If that fails, they stay in the stream for peers or the next start."""
        self._closing = True  # redis-py can swallow a cancellation, so the loop checks this as well
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        try:
            await self._drain()
        except StoreUnavailable:
            pass
        except Exception:  # a boundary: the rest has to be closed
            log.exception("%s left in %s, for peers or the next start", counted(self.waiting, "fact"), self._name)
        await self._redis.aclose()
        await self._store.close()

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        if not facts:
            return
        if self._held_bytes > HELD_BYTES:
            reason = f"the store is unavailable and the in-memory buffer ({HELD_BYTES >> 20} MB) is full"
            raise StoreUnavailable(reason, retry_after=1)
        if self._away or not await self._append(facts):
            await self._drain()  # first, as a new call may have one of these as its parent
            await self._store.write(facts)

    async def _append(self, facts: Sequence[EncodedFact]) -> bool:
        """Appends the facts to the stream; True if Redis has all of them."""
        records = [pack_fact(fact, self._known_parts) for fact in facts]
        groups, appended_at = _groups(records), time.monotonic()
        pipeline = self._redis.pipeline(transaction=False)
        for group in groups:
            pipeline.xadd(STREAM, {FIELD: _encoder.encode(records[group])})
        try:
            async with asyncio.timeout(REDIS_WITHIN_S):
                ids = await pipeline.execute()
        except (RedisError, OSError) as error:
            self._bypass(error)
            return False
        crash_point("ingest.appended")
        for fact in facts:
            if fact.parts:  # known parts are in the store, or in memory with an earlier fact
                fact.parts = {digest: part for digest, part in fact.parts.items() if digest not in self._known_parts}
        self._known_parts.update((digest, None) for fact in facts for digest in fact.parts)
        for entry_id, group in zip(ids, groups, strict=True):
            entry = _Entry(entry_id, facts[group], sum(map(len, records[group])), appended_at)
            entry.size += sum(FACT_BYTES + sum(map(len, fact.parts.values())) for fact in entry.facts)
            self._held.append(entry)
            self._held_bytes += entry.size
        self._filled.set()
        return True

    def _bypass(self, error: Exception) -> None:
        """Sends facts directly to the store until Redis answers again."""
        if not self._away:
            log.warning("Redis is unavailable, calls go to the store: %s", str(error) or "no answer in time")
        self._away = True
        self._filled.set()

    async def _run(self) -> None:
        """Writes the facts in memory whenever there are some, and sweeps from time to time."""
        self._sweep_at = time.monotonic() + self._sweep_s
        while not self._closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._sweep_at - time.monotonic())):
                    await self._filled.wait()
            self._filled.clear()
            await asyncio.sleep(PAUSE_S)
            try:
                try:
                    await self._work_off()
                except (StoreUnavailable, RedisError, OSError):
                    await self._wait_for_store()
                else:
                    self._outage.over("the ingest log works again")
            except Exception as error:  # noqa: BLE001  a boundary: whatever it is, what waits here is tried again
                reason = f"{type(error).__name__}: {error}"
                self._outage.failed(
                    "the ingest log failed, and tries again: %s", reason, level=logging.ERROR, exc_info=True
                )
                self._filled.set()
                await asyncio.sleep(RETRY_S)

    async def _work_off(self) -> None:
        """Writes the facts in memory, looks whether a Redis that was away is back, and sweeps if it is time."""
        try:
            await self._drain()
        finally:
            if self._away:
                await self._redis.connection_pool.disconnect()  # the address may lead elsewhere by now
                # Redis may be a replica now, or another one.
                async with asyncio.timeout(REDIS_WITHIN_S):
                    await self._check_redis()
                await self._append_lost()
                self._away = False
        if time.monotonic() < self._sweep_at:
            return
        self._sweep_at = time.monotonic() + self._sweep_s
        if not self._away:
            await self._check_redis()
            await self._set_mark()
            seconds, microseconds = await self._redis.time()
            id = int(1000 * (seconds - self._sweep_s) + microseconds / 1000)  # of an entry `SWEEP_S` old
            await self._sweep(str(id).encode())

    async def _wait_for_store(self) -> None:
        """Waits until the next attempt, and sees to it that Redis has what is in memory."""
        self._filled.set()
        if self._held and not self._away:
            try:
                await self._append_lost()
            except (RedisError, OSError) as error:
                self._bypass(error)
        await asyncio.sleep(RETRY_S)

    async def _check_redis(self) -> None:
        """Raises `StoreUnavailable` for a Redis that can lose facts, or is another store's. One that lost its data
        becomes this store's again."""
        if self._store_id is not None and self._own_id is None:
            self._own_id = await self._store_id()
        try:
            await check_settings(self._redis, self._name)
            if self._own_id is not None:
                await check_stream_owner(self._redis, self._name, self._own_id)
        except ConfigError as error:
            self._bypass(error)
            raise StoreUnavailable(error.message, retry_after=1) from error

    async def _drain(self) -> None:
        """Writes the facts in memory to the store, in order, and deletes their entries.

        If Redis is unavailable, the entries stay there. A later sweep writes them again, which is harmless.
        """
        async with self._draining:
            while entries := self._batch_of(iter(self._held)):
                facts = [fact for entry in entries for fact in entry.facts]
                await self._store_all(facts)
                if not self._away:
                    try:
                        async with asyncio.timeout(REDIS_WITHIN_S):
                            await self._delete([entry.id for entry in entries], facts)
                    except (RedisError, OSError) as error:
                        self._bypass(error)
                for entry in entries:
                    self._held.popleft()
                    self._held_bytes -= entry.size

    def _batch_of(self, held: Iterator[_Entry]) -> Sequence[_Entry]:
        """The first entries, about one batch."""
        entries: list[_Entry] = []
        facts = size = 0
        for entry in held:
            entries.append(entry)
            facts += len(entry.facts)
            size += entry.size
            if facts >= self._batch or size >= ENTRY_BYTES:
                break
        return entries

    async def _set_mark(self) -> None:
        await self._redis.set(self._mark, b"", ex=MARK_S)

    async def _append_lost(self) -> None:
        """Appends the facts in memory again if Redis was emptied, and sets the mark. Raises if Redis is unavailable."""
        async with asyncio.timeout(REDIS_WITHIN_S):
            if await self._redis.set(self._mark, b"", ex=MARK_S, xx=True):
                return
        if self._held:
            log.warning("Redis was emptied while the store is unavailable: appending %d groups again", len(self._held))
        held = iter(list(self._held))
        while entries := self._batch_of(held):
            pipeline = self._redis.pipeline(transaction=False)
            for entry in entries:
                pipeline.xadd(STREAM, {FIELD: _encoder.encode([pack_fact(fact) for fact in entry.facts])})
            async with asyncio.timeout(TIMEOUT_S):
                ids = await pipeline.execute()
            for entry, entry_id in zip(entries, ids, strict=True):
                entry.id = entry_id
        await self._set_mark()

    async def _store_all(self, facts: Sequence[EncodedFact]) -> None:
        """Writes the facts to the store. Raises `StoreUnavailable` if not even one fact is written in time."""
        start = 0
        while start < len(facts):
            some = facts[start : start + self._batch]
            try:
                async with asyncio.timeout(STORE_WITHIN_S):
                    await self._store.write(some)
            except TimeoutError:
                if self._batch == 1:
                    raise StoreUnavailable("the store is too slow", retry_after=1) from None
                self._batch = max(1, self._batch // 8)
            else:
                start += len(some)
                self._batch = min(BATCH, 2 * self._batch)
        crash_point("ingest.written")

    async def _delete(self, ids: Sequence[bytes], facts: Sequence[EncodedFact]) -> None:
        """Deletes entries whose facts the store has accepted or refused."""
        for fact in facts:
            if fact.failure is not None:
                await self._refuse(pack_fact(fact), str(fact.failure))
        await self._redis.xdel(STREAM, *ids)

    async def _refuse(self, data: bytes, reason: str) -> None:
        self._refused += 1
        log.error("the store refused a fact of the ingest stream; it is kept in %s: %s", REFUSED, reason)
        await self._redis.xadd(REFUSED, {"f": data, "reason": reason})

    async def _sweep(self, last: bytes) -> None:
        """Moves all entries up to `last` to the store, unless a peer is sweeping now."""
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
            await self._store_all(facts)
            await self._delete([entry_id for entry_id, _ in batch], facts)
        await self._redis.delete(SWEEPER)

    async def _range(self, last: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """The ids and packed facts of the stream's first entries, up to id `last`."""
        entries: Any = await self._redis.xrange(STREAM, max=last, count=count)
        return [(entry_id, fields.get(FIELD, b"")) for entry_id, fields in entries]

    async def settled(self) -> None:
        """Waits until the store has all facts that any proxy has appended before."""
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self._drain()
                if not self._away:
                    await self._until_moved(PATIENCE_S)
        except TimeoutError:
            raise StoreUnavailable("the store is catching up with the ingest stream", retry_after=1) from None
        except (RedisError, OSError) as error:
            log.warning("cannot ask Redis for the calls of other proxies: %s", error)
            self._bypass(error)
        await self._store.settled()

    async def _until_moved(self, patience_s: float) -> None:
        """Waits until all current entries are in the store. After `patience_s` this process sweeps them itself."""
        entries: Any = await self._redis.xrevrange(STREAM, count=1)
        last, sweep_at = entries[0][0] if entries else None, time.monotonic() + patience_s
        while last is not None and await self._range(last, 1):
            if time.monotonic() >= sweep_at:
                await self._sweep(last)
            await asyncio.sleep(POLL_S)


class OddErrors:
    """Over a connection of redis: an error that is none of redis-py's or the system's ends it, as theirs do.

    uvloop raises `RuntimeError` for what is written to a connection that has ended, and an answer that is no Redis's
    makes redis-py's parser raise what it likes.
    """

    async def send_packed_command(self, *arguments: Any, **more: Any) -> None:
        try:
            await super().send_packed_command(*arguments, **more)  # type: ignore[misc]
        except (RedisError, OSError):
            raise
        except Exception as error:  # noqa: BLE001  a boundary to redis-py and the event loop
            await self._end(error)

    async def read_response(self, *arguments: Any, **more: Any) -> Any:
        try:
            return await super().read_response(*arguments, **more)  # type: ignore[misc]
        except (RedisError, OSError):
            raise
        except Exception as error:  # noqa: BLE001  the same
            await self._end(error)

    async def _end(self, error: Exception) -> NoReturn:
        await self.disconnect(nowait=True)  # type: ignore[attr-defined]
        raise RedisConnectionError(f"{type(error).__name__}: {error}") from error


def _groups(records: Sequence[bytes]) -> list[slice]:
    """Slices of the packed facts, one for each entry of about `ENTRY_BYTES` at most."""
    ends: list[int] = []
    size = 0
    for end, record in enumerate(records, 1):
        size += len(record)
        if size > ENTRY_BYTES or end == len(records):
            ends.append(end)
            size = 0
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _packed_facts(entry: bytes) -> list[bytes]:
    try:
        return _decoder.decode(entry)
    except msgspec.MsgspecError:
        return [entry]  # not a list of facts: unpacking it fails, so it is refused


OLDEST_VERSION = (6, 2)

DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""The settings of a Redis that loses nothing that it acknowledged."""

OWNER = "rolltap:store"
"""The Redis key with the id of the store that owns the stream."""


async def check_settings(redis: Redis, url: str) -> bool:
    """Refuses a Redis that can lose what it acknowledged. Returns whether it shows its settings."""
    info: dict[str, Any] = await redis.info()
    version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
    if version < OLDEST_VERSION:
        raise ConfigError(f"{url}: Redis {info['redis_version']} is too old; 6.2 or later is needed")
    if info.get("aof_last_write_status", "ok") != "ok":
        raise ConfigError(f"{url} cannot write its append-only file; see its log")
    try:
        settings = await redis.config_get(*DURABLE)
    except ResponseError:
        return False
    wrong = {name: value for name, value in DURABLE.items() if settings.get(name) != value}
    if wrong:
        orders = "; ".join(f"CONFIG SET {name} {value}" for name, value in wrong.items())
        raise ConfigError(
            f"{url} can lose acknowledged calls; set this in redis.conf, or until it is restarted with: {orders}"
        )
    return True


async def check_stream_owner(redis: Redis, url: str, store: str) -> None:
    """Refuses the Redis of another store, as a sweep would write that store's calls to this one."""
    await redis.set(OWNER, store, nx=True)
    owner: Any = await redis.get(OWNER)
    if owner != store.encode():
        raise ConfigError(
            f"{url} is the ingest stream of another store, which would get this store's calls: give each store its own "
            f"Redis database (redis://HOST:PORT/DB). If your store was restored or upgraded, run in Redis: DEL {OWNER}"
        )
