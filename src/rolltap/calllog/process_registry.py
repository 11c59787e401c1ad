"""Registers the processes that write to a log, and aborts the open calls of dead ones.

A process has a row in `processes` from the transaction of its first intent on. Every `BEAT_S` it renews the row: the
time, and the id up to which all of its calls are complete, so that a search for its open calls reads few rows. That id
lags by `MARGIN_S`, as an id may be made well before its intent is written. A process that could not renew its row for
half of `GONE_S` does so with its next intent, as a peer may have removed the row.

On SQLite only one process can write, so every other one is dead. On Postgres a process is dead if its row is older than
`GONE_S` by the database's clock; the first peer that notices completes its open calls as presumed aborted. Nobody can
renew a row while Postgres is down, so the age counts from the server's start at the earliest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

import sqlalchemy as sa

from rolltap.calllog.base import CallIntent
from rolltap.calllog.database import Database, Durability
from rolltap.calllog.facts import aborted
from rolltap.calllog.insert import Insert
from rolltap.calllog.records import completion_row
from rolltap.calllog.schema import call_completions, call_intents, processes
from rolltap.errors import StoreError
from rolltap.tenants import EVERY_TENANT, acting_for

log = logging.getLogger("rolltap.store")

BEAT_S = 5.0
RETRY_S = 1.0
"""Seconds to the next heartbeat after one that could not be written."""
WITHIN_S = 10.0
"""Timeout of a heartbeat."""

GONE_S = 30.0
MARGIN_S = 600.0


class ProcessRegistry:
    """The processes that write to a log, including this one.

    Subclasses have the SQL for the clock and dead processes.
    """

    clock: str
    gone: str

    def __init__(
        self, database: Database, *, beat_s: float = BEAT_S, gone_s: float = GONE_S, margin_s: float = MARGIN_S
    ) -> None:
        self._database = database
        self._beat_s = beat_s
        self._gone_s = gone_s
        self._margin_s = margin_s
        self._own: set[str] = set()
        self._announced: dict[str, float] = {}
        self._open: dict[str, str] = {}
        self._latest: dict[str, str] = {}
        self._marks: deque[tuple[float, dict[str, str]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self.beats = True
        """Whether the last heartbeat could be written: a small write like those of calls."""
        insert = f"INSERT INTO processes (id, seen_at, complete_to) VALUES (:id, {self.clock}, :complete_to)"
        renewed = "seen_at = excluded.seen_at, complete_to = excluded.complete_to"
        self._seen = sa.text(f"{insert} ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at")
        self._renew = sa.text(f"{insert} ON CONFLICT (id) DO UPDATE SET {renewed}")

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Renews the rows a last time, so that the next start has to search only the calls that are open now."""
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        with suppress(StoreError):
            await self._beat_once(self._latest)

    def opened(self, intent: CallIntent) -> None:
        """Notes a call whose intent is about to be written."""
        self._own.add(intent.process)
        self._open[intent.id] = intent.process
        self._latest[intent.process] = max(intent.id, self._latest.get(intent.process, ""))

    def ended(self, call_id: str) -> None:
        """Notes a call whose completion is durable."""
        self._open.pop(call_id, None)

    def knows(self, ids: set[str]) -> bool:
        """Whether the rows of these processes are so recent that no peer can have removed them."""
        now = time.monotonic()
        return all(now < self._announced.get(process, 0.0) for process in ids)

    def announce(self, connection: sa.Connection, ids: set[str]) -> None:
        """Renews the rows of these processes, own or not, in the transaction that writes their intents."""
        for process in sorted(ids):
            connection.execute(self._seen, {"id": process, "complete_to": ""})

    def announced(self, ids: set[str], at: float) -> None:
        """Notes that a committed transaction that began at monotonic time `at` renewed the rows of these processes."""
        self._announced.update(dict.fromkeys(ids & self._own, at + self._gone_s / 2))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s if self.beats else min(self._beat_s, RETRY_S))
            try:
                async with asyncio.timeout(WITHIN_S):
                    await self._database.check()
                    await self._beat_once(self._latest_long_ago())
                    count = await self.abort_orphans(sorted(self._own), at=time.time())
            except (StoreError, TimeoutError) as error:
                self.beats = False
                log.warning("the heartbeat could not be written: %s", str(error) or "no answer in time")
                continue
            self.beats = True
            if count:
                log.warning("%d open calls of a dead process are recorded as aborted", count)

    def _latest_long_ago(self) -> dict[str, str]:
        """The greatest call id of each own process `MARGIN_S` ago, if known."""
        margin = time.monotonic() - self._margin_s
        self._marks.append((time.monotonic(), dict(self._latest)))
        while len(self._marks) > 1 and self._marks[1][0] <= margin:
            self._marks.popleft()
        marked_at, latest = self._marks[0]
        return latest if marked_at <= margin else {}

    async def _beat_once(self, latest: Mapping[str, str]) -> None:
        rows = [{"id": process, "complete_to": self._complete_to(process, latest)} for process in sorted(self._own)]
        began = time.monotonic()

        def renew(connection: sa.Connection) -> None:
            connection.execute(self._renew, rows)

        if rows:
            with acting_for(EVERY_TENANT):
                await self._database.transact(renew, Durability.PROCESS)
            self.announced({row["id"] for row in rows}, began)

    def _complete_to(self, process: str, latest: Mapping[str, str]) -> str:
        """An id below which all calls of `process` are complete."""
        open_calls = (call_id for call_id, owner in self._open.items() if owner == process)
        return min([latest.get(process, ""), *open_calls])

    async def abort_orphans(self, live: Sequence[str], *, at: float) -> int:
        """Completes the open calls of dead processes as aborted; returns their number."""

        def sweep(connection: sa.Connection) -> int:
            absent = connection.execute(sa.text(self.gone), {"age": self._gone_s} if ":age" in self.gone else {})
            dead = {row.id: row.complete_to for row in absent if row.id not in live}
            count = sum(_abort(connection, process, complete_to, at) for process, complete_to in dead.items())
            if dead:
                connection.execute(sa.delete(processes).where(processes.c.id.in_(dead)))
            return count

        with acting_for(EVERY_TENANT):
            return await self._database.transact(sweep)


def _abort(connection: sa.Connection, process: str, complete_to: str, at: float) -> int:
    orphans = (
        sa.select(call_intents.c.id)
        .outerjoin(call_completions, call_completions.c.call_id == call_intents.c.id)
        .where(call_completions.c.call_id.is_(None))
        .where(call_intents.c.id >= complete_to, call_intents.c.process == process)
    )
    rows = [completion_row(aborted(row[0], at), presumed=True) for row in connection.execute(orphans)]
    return Insert(call_completions, connection.dialect).run(connection, rows) if rows else 0


class SqliteRegistry(ProcessRegistry):
    """The registry on SQLite."""

    clock = "CAST(strftime('%s', 'now') AS REAL)"
    gone = "SELECT id, complete_to FROM processes"


class PostgresRegistry(ProcessRegistry):
    """The registry on Postgres."""

    clock = "extract(epoch FROM clock_timestamp())"
    gone = (
        "SELECT id, complete_to FROM processes WHERE extract(epoch FROM clock_timestamp()) "
        "- greatest(seen_at, extract(epoch FROM pg_postmaster_start_time())) > :age FOR UPDATE SKIP LOCKED"
    )


def registry_of(database: Database) -> ProcessRegistry:
    return PostgresRegistry(database) if database.dialect_name == "postgresql" else SqliteRegistry(database)
