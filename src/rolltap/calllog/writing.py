"""Writes groups of facts into the tables: encoding, one transaction, and what to do about rows that clash."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import sqlalchemy as sa

from rolltap.calllog import schema
from rolltap.calllog.base import CallCompletion, CallIntent
from rolltap.calllog.codec import pack_bytes
from rolltap.calllog.commit import Entry
from rolltap.calllog.database import Database, Durability
from rolltap.calllog.facts import Delivery, Fact, name_of
from rolltap.calllog.insert import Insert
from rolltap.calllog.process_registry import ProcessRegistry
from rolltap.calllog.records import (
    Row,
    completion_row,
    delivery_row,
    intent_row,
    same_row,
    session_row,
)
from rolltap.crash import crash_point
from rolltap.errors import RecordCorrupt, StoreUnavailable
from rolltap.types import Session

KNOWN_PARTS = 4096
PART_TRUST_S = 3600.0
"""How long a part that this process wrote is taken to be in the log without writing it again."""

MANY_BYTES = 256 << 10
"""Groups over this size are encoded in another thread, so that the event loop goes on."""


@dataclass(slots=True, eq=False)
class CommitBatch:
    """Encoded facts by table, the entries that they came from, and the large parts of their requests.

    `repeats` are entries with the key of another one of the group: they are for the next group.
    """

    rows: dict[sa.Table, list[Row]] = field(default_factory=dict)
    entries: dict[sa.Table, list[Entry[Fact]]] = field(default_factory=dict)
    parts: dict[bytes, bytes] = field(default_factory=dict)
    processes: set[str] = field(default_factory=set)
    repeats: list[Entry[Fact]] = field(default_factory=list)
    _keys: set[tuple[str, str]] = field(default_factory=set)

    def add(self, table: sa.Table, entry: Entry[Fact], row: Row) -> None:
        key = (table.name, row[0])
        if key in self._keys:
            self.repeats.append(entry)
            return
        self._keys.add(key)
        self.rows.setdefault(table, []).append(row)
        self.entries.setdefault(table, []).append(entry)

    @property
    def durability(self) -> Durability:
        relaxed = self.rows.keys() <= {schema.call_intents, schema.deliveries}
        return Durability.PROCESS if relaxed else Durability.POWER


class SpoolState(NamedTuple):
    """Of the spool that takes facts while the store is away."""

    in_use: bool
    room: bool  # for a new call


class GroupWriter(Protocol):
    """Makes groups of facts durable; a fact that can't be stored fails by itself."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def write(self, entries: Sequence[Entry[Fact]]) -> None:
        """Returns when every entry is durable or has its `failure`; raises if none is."""
        ...

    async def settled(self) -> None:
        """Returns when all that was written can be read from the store; `StoreUnavailable` if that takes long."""
        ...

    @property
    def waiting(self) -> int:
        """How many facts are durable but, as far as is known, not in the store yet."""
        ...

    @property
    def spool(self) -> SpoolState | None:
        """None: there is no spool."""
        ...


class FactWriter:
    """The one writer of call-log tables in a process: a `GroupWriter` whose facts are in the store at once."""

    waiting = 0
    spool = None

    def __init__(self, database: Database, registry: ProcessRegistry) -> None:
        self._database = database
        self._registry = registry
        dialect = database.dialect
        facts = (schema.sessions, schema.call_intents, schema.call_completions, schema.deliveries)
        self._inserts = {table: Insert(table, dialect) for table in facts}
        self._inserts[schema.parts] = Insert(schema.parts, dialect, replace="true")
        self._known_parts: OrderedDict[bytes, float] = OrderedDict()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def settled(self) -> None: ...

    async def write(self, entries: Sequence[Entry[Fact]]) -> None:
        """Commits the entries together; one that can't be written fails by itself."""
        heavy = sum(_weight(entry.value) for entry in entries) > MANY_BYTES
        group = await asyncio.to_thread(self._encode, entries) if heavy else self._encode(entries)
        if not group.rows:
            return
        try:
            inserted = await self._commit(group)
        except RecordCorrupt as error:
            if len(entries) == 1:
                entries[0].failure = error
                return
            for entry in entries:
                if entry.failure is None:
                    await self.write([entry])
            return
        crash_point("store.committed")
        self._registry.announced(group.processes)
        now = time.monotonic()
        self._known_parts.update(dict.fromkeys(group.parts, now))
        while len(self._known_parts) > KNOWN_PARTS:
            self._known_parts.popitem(last=False)
        for table, rows in group.rows.items():
            if inserted[table] < len(rows):
                await self._compare(table, group)
        if group.repeats:
            await self.write(group.repeats)

    def _encode(self, entries: Sequence[Entry[Fact]]) -> CommitBatch:
        group = CommitBatch()
        for entry in entries:
            try:
                self._encode_one(group, entry)
            except (TypeError, ValueError, msgspec.MsgspecError) as error:
                entry.failure = RecordCorrupt(f"{name_of(entry.value)} can't be stored: {error}")
        return group

    def _encode_one(self, group: CommitBatch, entry: Entry[Fact]) -> None:
        match entry.value:
            case CallIntent() as intent:
                row, parts = intent_row(intent)
                group.add(schema.call_intents, entry, row)
                group.parts.update(parts)
                group.processes.add(intent.process)
            case CallCompletion() as completion:
                group.add(schema.call_completions, entry, completion_row(completion))
            case Delivery() as delivery:
                group.add(schema.deliveries, entry, delivery_row(delivery))
            case Session() as session:
                group.add(schema.sessions, entry, session_row(session))

    async def _commit(self, group: CommitBatch) -> dict[sa.Table, int]:
        """Writes the group in one transaction, a second time if the connection was lost: writing twice is harmless."""
        trusted = time.monotonic() - PART_TRUST_S
        fresh = [digest for digest in group.parts if self._known_parts.get(digest, -PART_TRUST_S) <= trusted]
        parts = [(digest, time.time(), pack_bytes(group.parts[digest])) for digest in sorted(fresh)]
        rows = {schema.parts: parts, **group.rows} if parts else group.rows
        try:
            return await self._write_rows(rows, group)
        except StoreUnavailable:
            return await self._write_rows(rows, group)

    async def _write_rows(self, rows: Mapping[sa.Table, Sequence[Row]], group: CommitBatch) -> dict[sa.Table, int]:
        """How many rows of each table were new or took the place of another."""
        if self._registry.knows(group.processes):
            inserts = {self._inserts[table]: some for table, some in rows.items()}
            counts = await self._database.insert(inserts, group.durability)
            return dict(zip(rows, counts, strict=True))

        def work(connection: sa.Connection) -> dict[sa.Table, int]:
            self._registry.announce(connection, group.processes)
            inserted = {table: self._inserts[table].run(connection, some) for table, some in rows.items()}
            crash_point("store.transaction")
            return inserted

        return await self._database.transact(work, group.durability)

    async def _compare(self, table: sa.Table, group: CommitBatch) -> None:
        """Fails the entries whose row differs from the one that was there."""
        key = next(iter(table.primary_key))
        rows = group.rows[table]

        def stored(connection: sa.Connection) -> dict[str, Row]:
            query = sa.select(table).where(key.in_([row[0] for row in rows]))
            return {row[0]: tuple(row) for row in connection.execute(query)}

        there = await self._database.query(stored)
        for row, entry in zip(rows, group.entries[table], strict=True):
            if not same_row(table.name, there[row[0]], row):
                entry.failure = RecordCorrupt(f"{name_of(entry.value)} is in the log already, and differs")


def _weight(fact: Fact) -> int:
    """Roughly how many bytes there are to encode."""
    match fact:
        case CallIntent(new_ids=ids, request=request):
            return ids.nbytes + len(request.head) + sum(map(len, request.items)) + sum(map(len, request.fixed.values()))
        case CallCompletion(output_ids=ids, message=message, extras=extras):
            return 2 * ids.nbytes + len(message) + sum(array.nbytes for array in extras.values())
        case _:
            return 0
