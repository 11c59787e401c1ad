"""A Redis stream before the store: facts are durable when Redis has fsynced them, and reach the store in batches.

`write` appends a group to the stream as one entry; with `appendfsync always` Redis answers after its fsync. The proxy
holds what it appended in memory. `PAUSE_S` later it writes that to the store, many groups in one transaction, and
deletes the entries. So a proxy reads nothing back, and it does not matter to it whether Redis still has its data: facts
are lost only if Redis loses them and the proxy dies within that pause. While the store is away, a proxy looks after
each vain attempt whether Redis was emptied, and appends again what it holds; then the pause is as long as an attempt
takes, and `RETRY_S`.

The stream itself is read for proxies that died. Each proxy looks every `SWEEP_S` for entries that old, writes them to
the store, where writing twice is harmless, and deletes them; a lock in Redis keeps peers from doing so at once. A proxy
that starts sweeps everything first. A reader who waits for a peer longer than `PATIENCE_S` sweeps, too.

While Redis can't be reached, or takes longer than `REDIS_WITHIN_S`, facts go to the store directly, after those that
are held. While the store is away, about `HELD_BYTES` are held; further facts are refused, for a spool to take them.

A fact that the store refuses (another one is there under its id) can't be told to its appender any more: it is logged
as an error and kept in the stream `rolltap:refused`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from rolltap.calllog.fact_codec import EncodedFact, pack_fact, unpack_fact
from rolltap.calllog.redis_checks import check_settings, claim
from rolltap.calllog.writing import GroupWriter, SpoolState, known_parts
from rolltap.crash import crash_point
from rolltap.errors import RecordCorrupt, StoreUnavailable
from rolltap.ids import new_id

log = logging.getLogger("rolltap.store")

STREAM = "rolltap:calls"
REFUSED = "rolltap:refused"
SWEEPER = "rolltap:sweeper"

MARK = "rolltap:proxy:"
"""With an id of its own, a key of each proxy: where it is missing, Redis was emptied."""

MARK_S = 600

FIELD = b"facts"
"""The one field of an entry: msgpack of a list of packed facts."""

PAUSE_S = 0.02
"""How long facts are held for others to go to the store with them; a reader ends it."""

ENTRY_BYTES = 8 << 20
"""A group with more bytes becomes several entries."""

HELD_BYTES = 256 << 20
FACT_BYTES = 1000
"""About what a held fact takes in memory beside its bytes in the stream."""

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
REDIS_WITHIN_S = 1.0
"""A Redis that takes longer for what calls wait for is taken to be away."""

STORE_WITHIN_S = 5.0
"""A store that takes longer for a batch gets it again in smaller ones, over another connection."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])


@dataclass(slots=True)
class _Entry:
    """An entry of the stream, and its facts, which are held until the store has them. `size`: bytes in memory."""

    id: bytes
    facts: Sequence[EncodedFact]
    size: int


class IngestWriter:
    """A `GroupWriter` before another one. See the module."""

    def __init__(
        self,
        url: str,
        store: GroupWriter,
        *,
        store_id: Callable[[], Awaitable[str]] | None = None,
        sweep_s: float = SWEEP_S,
    ) -> None:
        """With `store_id` a Redis is refused that is another store's."""
        self._url = url
        self._store = store
        self._store_id = store_id
        self._sweep_s = sweep_s
        self._redis: Redis = Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        # Oldest first. Ids come again where Redis has lost its data.
        self._held: deque[_Entry] = deque()
        self._held_bytes = 0
        self._batch = BATCH
        self._known_parts = known_parts()
        self._mark = MARK + new_id()
        self._away = False
        self._closing = False
        self._filled = asyncio.Event()
        self._draining = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(len(entry.facts) for entry in self._held) + self._store.waiting

    @property
    def spool(self) -> SpoolState | None:
        return self._store.spool

    async def start(self) -> None:
        await self._store.start()
        try:
            await check_settings(self._redis, self._url)
            if self._store_id is not None:
                await claim(self._redis, self._url, await self._store_id())
            await self._set_mark()
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

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        if not facts:
            return
        if self._held_bytes > HELD_BYTES:
            raise StoreUnavailable("the store is away, and no more can be held for it", retry_after=1)
        if self._away or not await self._append(facts):
            await self._drain()  # first: a call may go on from one of these
            await self._store.write(facts)

    async def _append(self, facts: Sequence[EncodedFact]) -> bool:
        """Whether Redis has them all."""
        records = [pack_fact(fact, self._known_parts) for fact in facts]
        groups = _groups(records)
        pipeline = self._redis.pipeline(transaction=False)
        for group in groups:
            pipeline.xadd(STREAM, {FIELD: _encoder.encode(records[group])})
        try:
            async with asyncio.timeout(REDIS_WITHIN_S):
                ids = await pipeline.execute()
        except (RedisError, OSError) as error:
            self._pass_by(error)
            return False
        crash_point("ingest.appended")
        for fact in facts:
            if fact.parts:  # those that are known are in the store, or held with an earlier fact
                fact.parts = {digest: part for digest, part in fact.parts.items() if digest not in self._known_parts}
        self._known_parts.update((digest, None) for fact in facts for digest in fact.parts)
        for entry_id, group in zip(ids, groups, strict=True):
            self._hold(_Entry(entry_id, facts[group], sum(map(len, records[group]))))
        self._filled.set()
        return True

    def _hold(self, entry: _Entry) -> None:
        entry.size += sum(FACT_BYTES + sum(map(len, fact.parts.values())) for fact in entry.facts)
        self._held.append(entry)
        self._held_bytes += entry.size

    def _pass_by(self, error: Exception) -> None:
        """Facts go to the store directly until Redis answers again."""
        if not self._away:
            log.warning("Redis takes no calls, they go to the store: %s", str(error) or "no answer in time")
        self._away = True
        self._filled.set()

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
                try:
                    await self._drain()
                finally:
                    if self._away:
                        await self._ask_redis()
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + self._sweep_s
                    await self._set_mark()
                    await self._sweep(await self._old())
            except (StoreUnavailable, RedisError, OSError):
                self._filled.set()
                await self._append_lost()
                await asyncio.sleep(RETRY_S)

    async def _ask_redis(self) -> None:
        """Facts go to Redis again if it answers."""
        async with asyncio.timeout(REDIS_WITHIN_S):
            await self._redis.ping()
        self._away = False

    async def _drain(self) -> None:
        """Writes what is held to the store, in order, and deletes the entries.

        If Redis can't be reached, the entries stay there: they are swept later, which changes nothing in the store.
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
                        self._pass_by(error)
                for entry in entries:
                    self._held.popleft()
                    self._held_bytes -= entry.size

    def _batch_of(self, held: Iterator[_Entry]) -> Sequence[_Entry]:
        """The entries that come first: about a batch."""
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
        """Appends again what is held if Redis was emptied: the store is away, so nobody else has it."""
        if self._away or not self._held:
            return
        try:
            async with asyncio.timeout(REDIS_WITHIN_S):
                if await self._redis.set(self._mark, b"", ex=MARK_S, xx=True):
                    return
            log.warning("Redis was emptied while the store is away: %d groups are appended again", len(self._held))
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
        except (RedisError, OSError) as error:
            self._pass_by(error)

    async def _store_all(self, facts: Sequence[EncodedFact]) -> None:
        """Writes the facts to the store; `StoreUnavailable` if it does not take a single one in time."""
        start = 0
        while start < len(facts):
            some = facts[start : start + self._batch]
            try:
                async with asyncio.timeout(STORE_WITHIN_S):
                    await self._store.write(some)
            except TimeoutError:
                if self._batch == 1:
                    raise StoreUnavailable("the store takes too long", retry_after=1) from None
                self._batch = max(1, self._batch // 8)
            else:
                start += len(some)
                self._batch = min(BATCH, 2 * self._batch)
        crash_point("ingest.written")

    async def _delete(self, ids: Sequence[bytes], facts: Sequence[EncodedFact]) -> None:
        """Deletes the entries of facts that the store has, or has refused."""
        for fact in facts:
            if fact.failure is not None:
                await self._refuse(pack_fact(fact), str(fact.failure))
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
            await self._store_all(facts)
            await self._delete([entry_id for entry_id, _ in batch], facts)
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
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self._drain()
                if not self._away:
                    await self._until_moved(PATIENCE_S)
        except TimeoutError:
            raise StoreUnavailable("the store is catching up with the ingest stream", retry_after=1) from None
        except (RedisError, OSError) as error:
            log.warning("Redis can't be asked for the calls of other proxies: %s", error)
            self._pass_by(error)
        await self._store.settled()

    async def _until_moved(self, patience_s: float) -> None:
        """Returns when all entries of now are in the store; from `patience_s` on this process helps to move them."""
        last, sweep_at = await self._newest(), time.monotonic() + patience_s
        while last is not None and await self._range(last, 1):
            if time.monotonic() >= sweep_at:
                await self._sweep(last)
            await asyncio.sleep(POLL_S)


def _groups(records: Sequence[bytes]) -> list[slice]:
    """Which packed facts make an entry each, of up to about `ENTRY_BYTES`."""
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
        return [entry]  # not a fact: it is refused
