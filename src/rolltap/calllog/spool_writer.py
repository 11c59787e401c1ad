"""Writes to the store, and to the spool while the store is unavailable.

When a write to the store fails, its group and all later ones go to the spool, where they are durable. A task tries to
write the oldest spooled facts to the store every `PROBE_S`. When the store answers, the spool is drained into it. New
groups still go to the spool then, so that peers never find a call in the store before its parent. When one batch is
left, new groups wait for it and then go to the store again. Writing a fact twice is harmless. Readers wait until this
spool and those of the other workers in the same folder are empty.

If the store takes longer than `STALL_S` for a batch, it gets smaller batches, so a slow store gets all facts.

An intent that does not fit into the spool fails with `StoreUnavailable`, so its engine is never called. Some room is
reserved for completions of calls in flight. If the store refuses a spooled fact, its appender has already returned. So
the fact is logged as an error and kept in `<spool>.refused`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rolltap.calllog.fact_codec import EncodedFact, pack_fact, unpack_fact
from rolltap.calllog.schema import call_intents
from rolltap.calllog.spool import RETRY_AFTER_S, START, Spool, holds_records
from rolltap.calllog.sqlite import Worker
from rolltap.calllog.writing import GroupWriter, SpoolState
from rolltap.crash import crash_point
from rolltap.errors import RecordCorrupt, StoreUnavailable

log = logging.getLogger("rolltap.store")

PROBE_S = 0.5
STALL_S = 5.0
"""Timeout for the store to commit a group. A slower store counts as unavailable."""

BACK_WITHIN_S = 2.0
"""Seconds that a reader waits for an unavailable store: one that was slow only once is back by then."""

CATCH_UP_S = 10.0
"""Seconds that a reader waits for the spool to be drained."""

POLL_S = 0.1

DRAIN = 1000
DRAIN_BYTES = 4 << 20
"""Maximum facts (`DRAIN`) and approximate maximum bytes of a batch from the spool."""

CALL_BYTES = 65_536
"""A spool with less room for new calls than this is reported as full, although a small call may still fit."""


class SpoolWriter:
    """A `GroupWriter` with a spool before another one: see the module."""

    def __init__(
        self,
        store: GroupWriter,
        spool: Spool,
        *,
        others: Sequence[Path] = (),
        probe_s: float = PROBE_S,
        stall_s: float = STALL_S,
    ) -> None:
        """`others` are the spools of other processes that write to the same store."""
        self._store = store
        self._spool = spool
        self._others = others
        self._probe_s = probe_s
        self._stall_s = stall_s
        self._worker = Worker(1, "rolltap-spool")
        self._appending = asyncio.Lock()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._away = False
        self._since: float | None = None
        self._refused = 0
        self._batch = DRAIN
        self._position = START
        self._moved = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return self._spool.count + self._store.waiting

    @property
    def spool(self) -> SpoolState:
        room = self._spool.room(for_new_calls=True) >= CALL_BYTES
        seconds = 0.0 if self._since is None else time.monotonic() - self._since
        return SpoolState(self._away, room, seconds)

    @property
    def unseen(self) -> int:
        return self._spool.count + self._store.unseen

    @property
    def blind(self) -> bool:
        return self._store.blind

    @property
    def refused(self) -> int:
        return self._refused + self._store.refused

    async def start(self) -> None:
        """Opens the spool and drains the facts of an earlier process."""
        await self._store.start()
        await self._worker.run(self._spool.open)
        if self._spool.count:
            log.warning("the spool has %d facts of an earlier process; writing them to the store", self._spool.count)
            await self._drain()
        self._emptied.set()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Drains the spool if possible. Otherwise the facts stay in it for the next start."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            if self._spool.count:
                with suppress(StoreUnavailable, TimeoutError):
                    await self._move_all()
        await self._worker.run(self._spool.close)
        self._worker.shutdown()
        await self._store.close()

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        while not await self._store_takes(facts):
            if await self._append([fact for fact in facts if fact.failure is None]):
                return

    async def _store_takes(self, facts: Sequence[EncodedFact]) -> bool:
        """Writes the facts to the store. False if it is unavailable or the spool must be drained first."""
        if self._away or not self._emptied.is_set():
            return False
        try:
            async with asyncio.timeout(self._stall_s):
                await self._store.write(facts)
        except (StoreUnavailable, TimeoutError) as error:
            self._away = True
            self._since = self._since or time.monotonic()
            self._filled.set()
            log.warning("the store is unavailable, calls go to the spool: %s", str(error) or "a commit took too long")
            return False
        return True

    async def _append(self, facts: Sequence[EncodedFact]) -> bool:
        """Appends the facts to the spool. False if it was drained in the meantime: then the store accepts them."""
        async with self._appending:
            if not self._away and self._emptied.is_set():
                return False
            records: list[bytes] = []
            room = {new: self._spool.room(for_new_calls=new) for new in (True, False)}
            for fact in facts:
                record = pack_fact(fact)
                size = self._spool.size(record)
                if size > room[fact.table is call_intents]:
                    message = "the store is unavailable and the spool is full"
                    fact.failure = StoreUnavailable(message, retry_after=RETRY_AFTER_S)
                    continue
                room = {new: left - size for new, left in room.items()}
                records.append(record)
            if records:
                await self._worker.run(lambda: self._spool.append(records))
                crash_point("spool.appended")
                self._emptied.clear()
                self._filled.set()  # also if the spool was just being cleared
            return True

    async def settled(self) -> None:
        try:
            async with asyncio.timeout(BACK_WITHIN_S):
                while self._away:  # noqa: ASYNC110  no event tells when the store is back
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = "the store is unavailable; calls wait in the spool"
            raise StoreUnavailable(message, retry_after=RETRY_AFTER_S) from None
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self._emptied.wait()
                while any(map(holds_records, self._others)):  # noqa: ASYNC110  another process empties it
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise StoreUnavailable("the store is catching up with the spool", retry_after=RETRY_AFTER_S) from None
        await self._store.settled()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(self._probe_s)
            with suppress(StoreUnavailable):
                await self._drain()

    async def _drain(self) -> None:
        """Moves the spool to the store. Raises `StoreUnavailable` if not even one fact is written in time."""
        while True:
            try:
                await self._move_all()
            except StoreUnavailable:
                self._away = True
                raise
            except TimeoutError:
                self._away = True
                if self._batch == 1:
                    raise StoreUnavailable("the store is too slow", retry_after=RETRY_AFTER_S) from None
                self._batch = max(1, self._batch // 8)
            else:
                return

    async def _move_all(self) -> None:
        """Empties the spool. New facts wait while the last batch is moved."""
        while await self._move_batch() and self._leaves_many():
            pass
        async with self._appending:
            while await self._move_batch():
                pass
            if self._moved < self._spool.count:
                copy = await self._worker.run(self._spool.keep_copy)
                log.error("cannot read %d facts of the spool; it is kept as %s", self._spool.count - self._moved, copy)
            crash_point("spool.drained")
            await self._worker.run(self._spool.clear)
            log.warning("the store is back: %d facts were moved from the spool to it", self._moved)
            self._position, self._moved = START, 0
            self._away, self._since = False, None
            self._filled.clear()
            self._emptied.set()

    def _leaves_many(self) -> bool:
        """Whether more than one batch is left."""
        return self._spool.count - self._moved > self._batch or self._spool.left(self._position) > DRAIN_BYTES

    async def _move_batch(self) -> bool:
        """Moves the oldest facts of the spool; False if no readable one is left. Raises `TimeoutError`."""
        records, position = await self._worker.run(lambda: self._spool.read(self._position, self._batch, DRAIN_BYTES))
        if not records:
            return False
        async with asyncio.timeout(self._stall_s):
            await self._move(records)
        self._away = False
        self._position = position
        self._moved += len(records)
        self._batch = min(DRAIN, 2 * self._batch)
        return True

    async def _move(self, records: Sequence[bytes]) -> None:
        facts: list[EncodedFact] = []
        for record in records:
            try:
                facts.append(unpack_fact(record))
            except RecordCorrupt as error:
                await self._set_aside(record, str(error))
        await self._store.write(facts)
        for fact in facts:
            if fact.failure is not None:
                await self._set_aside(pack_fact(fact), f"{fact.name}: {fact.failure}")

    async def _set_aside(self, record: bytes, reason: str) -> None:
        self._refused += 1
        path = await self._worker.run(lambda: self._spool.set_aside(record))
        log.error("the store refused a fact of the spool; it is kept in %s: %s", path, reason)
