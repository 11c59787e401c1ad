"""Transactions of the ledger: the settings, a transaction with its time and its events, and what follows a commit.

Every operation of the ledger is a plain function of a `Tx`, run in one call to the database's thread. To avoid
deadlocks, rows are locked in the order trainer, policy, lease, demand, group, and rows of other trainers only if they
are free (`SKIP LOCKED`). A rollout is changed only under its group's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from rolltap.calllog.backend import RETRY_AFTER_S, database_clock
from rolltap.calllog.database import Database
from rolltap.contract.operations import RequestTry, current_try
from rolltap.crash import crash_point
from rolltap.errors import LedgerError, NotFound, RolltapError, StoreError, StoreUnavailable
from rolltap.ledger.schema import events

CloseSession = Callable[[str], Awaitable[None]]
"""Closes a session, so that later calls with its key are refused. Closing it again has no effect."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Times are in seconds."""

    max_failures: int = 3
    """A group is dead after this many refusals by trainers."""

    lease_ttl: float = 600.0
    """Default lifetime of a lease."""

    poll: float = 0.5
    """Interval at which a waiting lease looks for changes by other processes."""

    open_retry_after: float = 1.0
    """`Retry-After` if too many groups are outstanding."""

    trainer_silence: float = 600.0
    """A trainer that took, extended or ended no lease for this long does not count for backpressure."""

    barrier: bool = False
    """Whether a group that trains several policies opens only once all of them have made and serve their step."""

    infra_retries: int = 3
    """Number of retries of a rollout after infrastructure failures. The next such failure ends it."""

    max_generations: int = 4
    """Maximum number of groups for one task when zero-variance groups are replaced, including the first."""

    event_memory: float = 86_400.0
    """Time for which events are kept."""


T = TypeVar("T")

WITHIN_S = 30.0
"""Longest transaction of the ledger on Postgres; an ordinary one takes milliseconds."""

BULK_WITHIN_S = 300.0
"""The same for one over as many rows as there are: 10,000 tasks take half a minute on a busy machine."""

Clock = Callable[[sa.Connection], float]


@dataclass(slots=True, eq=False)
class Tx:
    """A transaction: the argument of the ledger's functions."""

    connection: sa.Connection
    now: float
    noted: list[dict[str, Any]] = field(default_factory=list)
    ended_sessions: list[str] = field(default_factory=list)
    wakes_trainers: bool = False

    def all(self, statement: sa.Executable) -> Sequence[sa.Row[Any]]:
        return self.connection.execute(statement).all()

    def first(self, statement: sa.Executable) -> sa.Row[Any] | None:
        return self.connection.execute(statement).first()

    def scalar(self, statement: sa.Executable) -> Any:
        return self.connection.execute(statement).scalar()

    def run(self, statement: sa.Executable, rows: Sequence[Mapping[str, Any]] | None = None) -> int:
        """Runs a statement; returns the number of affected rows."""
        if rows is not None and not rows:
            return 0
        return self.connection.execute(statement, rows).rowcount  # type: ignore[arg-type]

    def insert_new(self, table: sa.Table, values: Mapping[str, Any]) -> bool:
        """Inserts a row unless one with this key exists; True if it did."""
        dialect = sqlite if self.connection.dialect.name == "sqlite" else postgresql
        return self.connection.execute(dialect.insert(table).values(values).on_conflict_do_nothing()).rowcount > 0

    def note(self, kind: str, subject: str, **data: Any) -> None:
        """Records an event, visible to others after the commit."""
        self.noted.append({"at": self.now, "kind": kind, "subject": subject, "data": data})

    def end_session(self, session_id: str | None) -> None:
        """Closes the session after the commit."""
        if session_id is not None:
            self.ended_sessions.append(session_id)

    def wake_trainers(self) -> None:
        """Makes waiting lease requests look again after the commit."""
        self.wakes_trainers = True


@asynccontextmanager
async def _limit(database: Database, seconds: float) -> AsyncIterator[None]:
    """A connection to Postgres may be lost without a word from either side. What waits on it would wait for ever."""
    try:
        async with asyncio.timeout(seconds if database.dialect_name == "postgresql" else None):
            yield
    except TimeoutError:
        raise StoreUnavailable(f"the store did not answer within {seconds:g} s", retry_after=RETRY_AFTER_S) from None


TRIED_AGAIN = "tried_again"
"""The event of a request that was carried out by a later try than its first."""


def _check_try(tx: Tx, request_try: RequestTry) -> None:
    """Refuses a try of a request of which a later one was carried out: it was under way when its client tried again.

    It follows the work, as that has waited for the locks of the other try.
    """
    known = sa.select(events.c.data).where(events.c.subject == request_try.request, events.c.kind == TRIED_AGAIN)
    numbers = {row.data["number"] for row in tx.all(known)}
    if max(numbers, default=0) > request_try.number:
        raise LedgerError("a later try of this request was carried out: this one came late")
    if request_try.number and request_try.number not in numbers:
        tx.note(TRIED_AGAIN, request_try.request, number=request_try.number)


class Ticket(asyncio.Event):
    async def wait_at_most(self, seconds: float) -> None:
        """Waits until the ticket is set, or until the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self.wait()


class Wakeups:
    """Wakes waiters in this process when something changes. Take a ticket, look, then wait for the ticket."""

    def __init__(self) -> None:
        self._current = Ticket()

    def ticket(self) -> Ticket:
        """A ticket that is set by the next `wake`."""
        return self._current

    def wake(self) -> None:
        self._current.set()
        self._current = Ticket()


class UnitOfWork:
    """Runs the ledger's transactions; its parts share one.

    They take at most half of the connections to Postgres: while they wait for a row, calls go on.
    """

    def __init__(
        self,
        database: Database,
        *,
        close_session: CloseSession,
        settings: LedgerSettings,
        clock: Clock = database_clock,
    ) -> None:
        self.close_session = close_session
        self.settings = settings
        self.ready = Wakeups()
        self.changed = Wakeups()
        self._database = database
        self._clock = clock
        _, connections = database.connections or (0, 2)
        self._turns = asyncio.Semaphore(max(1, connections // 2))

    async def transact(self, work: Callable[[Tx], T], *, within_s: float = WITHIN_S) -> T:
        """Runs `work` in one durable transaction, then closes the sessions that it ended and wakes waiters.

        Raises `StoreUnavailable` if that takes longer than `within_s`. As with every lost connection, it may have been
        committed. An error of `work` is raised once the server has proved that it was not replaced: it may be wrong.
        """
        request_try = current_try.get()  # here: SQLite's thread has no context
        timeline = self._database.timeline

        def run(connection: sa.Connection) -> tuple[T, Tx]:
            transaction = Tx(connection, self._clock(connection))
            result = work(transaction)
            if request_try is not None:
                _check_try(transaction, request_try)
            transaction.run(events.insert(), transaction.noted)
            crash_point("ledger.transaction")
            return result, transaction

        async with _limit(self._database, within_s), self._turns:
            try:
                result, transaction = await self._database.transact(run)
            except StoreError:
                raise
            except RolltapError:
                await self._confirm(timeline)
                raise
        crash_point("ledger.committed")
        if transaction.noted:
            self.changed.wake()
        if transaction.wakes_trainers:
            self.ready.wake()
        for session_id in transaction.ended_sessions:
            with suppress(NotFound):  # its server died before it could store it
                await self.close_session(session_id)
        return result

    async def query(self, work: Callable[[Tx], T]) -> T:
        """Runs `work` on a read-only snapshot. Raises `StoreUnavailable` if that takes longer than `WITHIN_S`, and an
        error of `work` once the server has proved that it was not replaced."""
        timeline = self._database.timeline
        async with _limit(self._database, WITHIN_S):
            try:
                return await self._database.query(lambda connection: work(Tx(connection, self._clock(connection))))
            except StoreError:
                raise
            except RolltapError:
                await self._confirm(timeline)
                raise

    async def _confirm(self, timeline: int) -> None:
        """Returns if the server that was asked at `timeline` was not replaced. Raises `StoreUnavailable` if another one
        was promoted since: it would confirm itself."""
        await self._database.confirm()
        if self._database.timeline != timeline:
            raise StoreUnavailable("another server was promoted meanwhile", retry_after=RETRY_AFTER_S)

    async def select(self, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """The rows of a single statement, without a transaction."""
        return await self._database.select(statement)
