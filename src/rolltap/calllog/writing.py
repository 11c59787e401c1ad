"""Writes encoded facts to the tables, one transaction per batch, and handles conflicting rows.

A standby that is promoted lacks the last commits if it was asynchronous. So what this process wrote to Postgres in the
last `RECENT_S` stays in memory, at most `RECENT_BYTES`, and is written again behind each promotion: writing twice is
harmless. Facts of other processes are theirs to write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import sqlalchemy as sa
from cachetools import TTLCache

from rolltap.calllog.backend import Durability, Insert
from rolltap.calllog.codec import INTENT_PROCESS, EncodedFact, Row, pack_bytes, same_row
from rolltap.calllog.database import Database
from rolltap.calllog.processes import ProcessRegistry
from rolltap.calllog.schema import call_completions, call_intents, deliveries, parts, sessions
from rolltap.crash import crash_point
from rolltap.errors import RecordCorrupt, StoreUnavailable
from rolltap.tenants import EVERY_TENANT, acting_for

log = logging.getLogger("rolltap.store")

RECENT_S = 60.0
RECENT_BYTES = 32 << 20
FACT_BYTES = 1000
"""Estimated bytes of a fact in memory, beside those of its texts and arrays."""

IN_STREAM_S = 1.0
"""Seconds for which a fact may be in the ingest stream only, before its process says so to its peers."""

KNOWN_PARTS = 4096
PART_TRUST_S = 3600.0
"""Seconds for which a part that this process wrote is not written again."""

_RELAXED = {call_intents, deliveries}
"""Tables whose facts must survive only the death of this process. All others must survive loss of power."""


def known_parts() -> TTLCache[bytes, None]:
    """A cache of the hashes of request parts that were written recently."""
    return TTLCache(KNOWN_PARTS, PART_TRUST_S)


class CommitBatch:
    """Encoded facts by table and key, and the large parts of their requests.

    `repeats` are facts with the same key as another one in the batch. They belong to the next batch.
    """

    def __init__(self, facts: Sequence[EncodedFact]) -> None:
        self.facts: dict[sa.Table, dict[str, EncodedFact]] = {}
        self.parts: dict[bytes, bytes] = {}
        self.processes: set[str] = set()
        self.repeats: list[EncodedFact] = []
        for fact in facts:
            if self.facts.setdefault(fact.table, {}).setdefault(fact.row[0], fact) is not fact:
                self.repeats.append(fact)
            elif fact.table is call_intents:
                self.parts.update(fact.parts)
                self.processes.add(fact.row[INTENT_PROCESS])

    @property
    def durability(self) -> Durability:
        return Durability.PROCESS if self.facts.keys() <= _RELAXED else Durability.POWER

    def rows(self) -> dict[sa.Table, list[Row]]:
        return {table: [fact.row for fact in by_key.values()] for table, by_key in self.facts.items()}


class SpoolState(NamedTuple):
    """State of the spool that takes facts while the store is unavailable."""

    in_use: bool
    room: bool  # for a new call
    seconds: float = 0.0  # for which facts have gone to it, or wait in it


class GroupWriter(Protocol):
    """Makes groups of facts durable. A fact that cannot be stored fails without affecting the others."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        """Returns when every fact is durable or has a `failure`. Raises if none is durable."""
        ...

    async def settled(self) -> None:
        """Waits until all written facts can be read from the store. Raises `StoreUnavailable` if that takes long."""
        ...

    @property
    def waiting(self) -> int:
        """The number of facts that are durable but not known to be in the store yet."""
        ...

    @property
    def unseen(self) -> int:
        """The number of durable facts that another process may not be able to read: they are neither in the store, nor
        in the stream since less than `IN_STREAM_S`."""
        ...

    @property
    def blind(self) -> bool:
        """Whether this process can't read the stream, in which other processes may have facts."""
        ...

    @property
    def refused(self) -> int:
        """The number of acknowledged facts that the store refused. They are kept elsewhere."""
        ...

    @property
    def spool(self) -> SpoolState | None:
        """The state of the spool; None if there is none."""
        ...


class RecentFacts:
    """Groups of facts of the last `RECENT_S`, the oldest first. The newest group stays, whatever its size."""

    def __init__(self) -> None:
        self._held: deque[tuple[float, int, Sequence[EncodedFact]]] = deque()  # monotonic time, bytes, facts
        self._bytes = 0

    @property
    def groups(self) -> Sequence[Sequence[EncodedFact]]:
        return [facts for _, _, facts in self._held]

    @property
    def seconds(self) -> float:
        """How far back they go."""
        return time.monotonic() - self._held[0][0] if self._held else 0.0

    def add(self, facts: Sequence[EncodedFact]) -> None:
        now, size = time.monotonic(), sum(map(_size, facts))
        self._held.append((now, size, facts))
        self._bytes += size
        while len(self._held) > 1 and (self._bytes > RECENT_BYTES or self._held[0][0] < now - RECENT_S):
            self._bytes -= self._held.popleft()[1]


def _size(fact: EncodedFact) -> int:
    values = sum(len(value) for value in fact.row if isinstance(value, bytes | str))
    return FACT_BYTES + values + sum(map(len, fact.parts.values()))


class FactWriter:
    """Writes directly to the call log's tables. The only writer of them in a process."""

    waiting = 0
    unseen = 0
    blind = False
    refused = 0
    spool = None

    def __init__(self, database: Database, registry: ProcessRegistry) -> None:
        self._database = database
        self._registry = registry
        dialect = database.dialect
        facts = (sessions, call_intents, call_completions, deliveries)
        self._inserts = {table: Insert(table, dialect) for table in facts}
        self._inserts[parts] = Insert(parts, dialect, replace="true")
        self._known_parts = known_parts()
        self._recent = RecentFacts()
        self._timeline = 0
        self._again: deque[Sequence[EncodedFact]] = deque()  # groups to be written again
        self._writing_again = asyncio.Lock()
        self.written_again = 0
        """The number of acknowledged facts that a promoted server lacked, and got from this process."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def settled(self) -> None: ...

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        """Commits the facts together. If a row is refused, it commits them one by one."""
        if not facts:
            return
        batch, timeline = CommitBatch(facts), -1
        inserted: Mapping[sa.Table, int] = {}
        try:
            while timeline != self._database.timeline:  # a server was promoted meanwhile: it may lack this commit
                timeline = self._database.timeline
                await self.follow_promotion()
                inserted = await self._commit(batch)
        except RecordCorrupt as error:
            if len(facts) == 1:
                facts[0].failure = error
                return
            for fact in facts:
                await self.write([fact])
            return
        crash_point("store.committed")
        self.remember(facts, batch.parts)
        self._known_parts.update(dict.fromkeys(batch.parts))  # only written parts, so that `seen_at` stays recent
        for table, by_key in batch.facts.items():
            if inserted[table] < len(by_key):
                await self._compare(table, by_key)
        await self.write(batch.repeats)

    def remember(self, facts: Sequence[EncodedFact], new_parts: Mapping[bytes, bytes]) -> None:
        """Holds committed facts, and those of their parts that were committed with them, for a promotion."""
        if self._database.dialect_name == "postgresql":
            own = [{digest: part for digest, part in fact.parts.items() if digest in new_parts} for fact in facts]
            self._recent.add([EncodedFact(fact.table, fact.row, some) for fact, some in zip(facts, own, strict=True)])

    async def follow_promotion(self) -> None:
        """Writes the recent facts again if another server was promoted since the last time. Goes on where it stopped if
        it is cancelled or the store goes away."""
        if self._timeline == self._database.timeline:
            return
        async with self._writing_again:
            while self._timeline != (timeline := self._database.timeline):
                self._known_parts.clear()
                self._again = deque(self._recent.groups)
                await self._write_again(timeline)
                self._timeline = timeline

    async def _write_again(self, timeline: int) -> None:
        lacked, seconds, oldest_lacked = 0, self._recent.seconds, False
        while self._again:
            batch, oldest = CommitBatch(self._again[0]), len(self._again) == len(self._recent.groups)
            try:
                inserted = await self._commit(batch)
            except RecordCorrupt as error:
                log.error("a promoted server refused facts that the one before it had: %s", error)
                inserted = {}
            count = sum(inserted.get(table, 0) for table in batch.facts)
            lacked += count
            self.written_again += count
            oldest_lacked = oldest_lacked or (oldest and count > 0)
            self._again.popleft()
        if lacked:
            log.error(
                "a Postgres was promoted (timeline %d) that lacked %d acknowledged facts of the last %.0f s; they are "
                "written again%s. What the ledger got in that time (rewards, leases, acknowledgements, ends) is lost: "
                "make the standby synchronous (synchronous_standby_names)",
                timeline,
                lacked,
                seconds,
                ", and older ones may be lost" if oldest_lacked else "",
            )

    async def _commit(self, batch: CommitBatch) -> dict[sa.Table, int]:
        """Writes the batch in one transaction. Tries again if the connection was lost: writing twice is harmless."""
        batch.parts = {digest: part for digest, part in batch.parts.items() if digest not in self._known_parts}
        rows = batch.rows()
        if batch.parts:
            # Sorted: two proxies that write the same parts must lock them in the same order.
            part_rows: list[Row] = [(key, time.time(), pack_bytes(part)) for key, part in sorted(batch.parts.items())]
            rows = {parts: part_rows, **rows}
        with acting_for(EVERY_TENANT):  # the tenant follows from the session's tags
            try:
                return await self._write_rows(rows, batch)
            except StoreUnavailable:
                return await self._write_rows(rows, batch)

    async def _write_rows(self, rows: Mapping[sa.Table, Sequence[Row]], batch: CommitBatch) -> dict[sa.Table, int]:
        """Writes the rows; returns the number of new or replaced rows of each table."""
        if self._registry.knows(batch.processes):
            inserts = {self._inserts[table]: some for table, some in rows.items()}
            counts = await self._database.insert(inserts, batch.durability)
            return dict(zip(rows, counts, strict=True))

        def work(connection: sa.Connection) -> dict[sa.Table, int]:
            self._registry.announce(connection, batch.processes)
            inserted = {table: self._inserts[table].run(connection, some) for table, some in rows.items()}
            crash_point("store.transaction")
            return inserted

        began = time.monotonic()
        inserted = await self._database.transact(work, batch.durability)
        self._registry.announced(batch.processes, began)
        return inserted

    async def _compare(self, table: sa.Table, facts: Mapping[str, EncodedFact]) -> None:
        """Sets a failure on facts whose row differs from the existing one."""
        key = next(iter(table.primary_key))

        def read(connection: sa.Connection) -> dict[str, Row]:
            query = sa.select(table).where(key.in_(facts))
            return {row[0]: tuple(row) for row in connection.execute(query)}

        with acting_for(EVERY_TENANT):
            stored = await self._database.query(read)
        for row_key, fact in facts.items():
            if not same_row(table.name, stored[row_key], fact.row):
                fact.failure = RecordCorrupt(f"{fact.name} is already in the log with other values")
