"""The one door to a database, shared by the call log and the ledger.

`Database(url)` speaks to SQLite (`sqlite:///path`) and Postgres (`postgresql://...`) through SQLAlchemy Core:

    async with db.write() as connection:      # one transaction, committed at exit, rolled back on any error
        result = await connection.execute(update(leases).where(...).values(...))
    async with db.read() as connection:       # a snapshot; can't write
        rows = (await connection.execute(select(groups))).all()

`transact` and `query` do the same for a plain function of a synchronous SQLAlchemy connection, in one hop to the
database instead of one a statement: the hot path's form.

Invariants:

* When `write` or `transact` returns, the transaction is durable: fsynced for `Durability.POWER`, safe from the death
  of this process for `Durability.PROCESS`.
* On SQLite one connection of one process writes (see `rolltap.calllog.sqlite`); on Postgres transactions run
  concurrently at READ COMMITTED, and reads in a REPEATABLE READ snapshot.
* A cancelled caller never leaves a transaction open.
* Only `StoreUnavailable`, `RecordCorrupt` and `ConfigError` leave this module for what a database does wrong.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import CursorResult

from rolltap.calllog.insert import Insert, Row
from rolltap.errors import ConfigError

T = TypeVar("T")
Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
Work = Callable[[sa.Connection], T]

APPLICATION = "rolltap"

_IDENTITY = sa.select(
    sa.literal_column("(SELECT system_identifier FROM pg_control_system()) || '-' || oid")
).select_from(sa.text("pg_database WHERE datname = current_database()"))


class Durability(StrEnum):
    """What a committed transaction survives at the least."""

    PROCESS = "process"  # kill -9 of this process
    POWER = "power"  # loss of power, too


class Connection(Protocol):
    """A connection within a transaction."""

    async def execute(self, statement: sa.Executable, parameters: Parameters = None) -> CursorResult[Any]:
        """Runs a statement (a sequence of parameters: once for each); the result is buffered.

        `rowcount` is right for a plain UPDATE or DELETE; with RETURNING, count the rows.
        """
        ...

    async def scalar(self, statement: sa.Executable, parameters: Parameters = None) -> Any:
        """The first column of the first row, or None."""
        ...

    async def run(self, work: Work[T]) -> T:
        """Runs `work` on the synchronous connection. It must not block on anything but the database."""
        ...

    async def now(self) -> float:
        """The database's clock, in seconds since the epoch."""
        ...


class Backend(Protocol):
    """One kind of database behind `Database`."""

    dialect: sa.Dialect

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def write(self, durability: Durability) -> AbstractAsyncContextManager[Connection]: ...

    def read(self) -> AbstractAsyncContextManager[Connection]: ...

    async def transact(self, work: Work[T], durability: Durability) -> T: ...

    async def query(self, work: Work[T]) -> T: ...

    async def select(self, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]: ...

    async def insert(self, rows: Mapping[Insert, Sequence[Row]], durability: Durability) -> Sequence[int]: ...


def _sqlite(url: sa.URL, writable: bool, application: str) -> Backend:
    from rolltap.calllog.sqlite import SqliteBackend

    return SqliteBackend(url, writable=writable)


def _postgres(url: sa.URL, writable: bool, application: str) -> Backend:
    from rolltap.calllog.postgres import PostgresBackend

    return PostgresBackend(url, writable=writable, application=application)


BACKENDS: Mapping[str, Callable[[sa.URL, bool, str], Backend]] = {"sqlite": _sqlite, "postgresql": _postgres}


class Database:
    """See the module. With `writable=False` nothing can be written, and another process may be the writer.

    Postgres knows the connections as those of `application`.
    """

    def __init__(self, url: str, *, writable: bool = True, application: str = APPLICATION) -> None:
        self.url = parse_url(url)
        self.name = self.url.render_as_string(hide_password=True)
        self.writable = writable
        self._backend = BACKENDS[self.url.drivername](self.url, writable, application)

    @property
    def dialect(self) -> sa.Dialect:
        """For rendering statements ahead of time."""
        return self._backend.dialect

    @property
    def dialect_name(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._backend.dialect.name

    async def start(self, metadata: sa.MetaData | None = None) -> None:
        """Connects and makes the tables of `metadata` that are missing. Closes itself if that fails."""
        try:
            await self._backend.start()
            if metadata is not None and self.writable:
                await self._backend.transact(lambda connection: _create(connection, metadata), Durability.POWER)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._backend.close()

    @asynccontextmanager
    async def write(self, durability: Durability = Durability.POWER) -> AsyncIterator[Connection]:
        """A transaction; on SQLite the only one at that time."""
        self._check_writable()
        async with self._backend.write(durability) as connection:
            yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Connection]:
        """A snapshot to read from."""
        async with self._backend.read() as connection:
            yield connection

    async def transact(self, work: Work[T], durability: Durability = Durability.POWER) -> T:
        """Runs `work` in a transaction of its own and commits."""
        self._check_writable()
        return await self._backend.transact(work, durability)

    async def query(self, work: Work[T]) -> T:
        """Runs `work` on a snapshot."""
        return await self._backend.query(work)

    async def select(self, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """The rows of one statement, which is its own snapshot: on Postgres one round trip instead of three."""
        return await self._backend.select(statement)

    async def insert(self, rows: Mapping[Insert, Sequence[Row]], durability: Durability) -> Sequence[int]:
        """Runs the inserts in a transaction of their own, past SQLAlchemy; how many rows of each were new or replaced.

        On Postgres that is one round trip, and half of the processor time of `transact`.
        """
        self._check_writable()
        return await self._backend.insert(rows, durability)

    async def now(self) -> float:
        """The database's clock, in seconds since the epoch. In a transaction, ask its connection instead."""
        async with self._backend.read() as connection:
            return await connection.now()

    async def identity(self) -> str:
        """Tells this Postgres database from any other, of other servers too. One restored from a dump has another."""
        ((identity,),) = await self.select(_IDENTITY)
        return identity

    def _check_writable(self) -> None:
        if not self.writable:
            raise ConfigError(f"{self.name} was opened for reading only")


def database_clock(connection: sa.Connection) -> float:
    """The time of the database's server in seconds since the epoch (SQLite's is this machine's)."""
    if connection.dialect.name == "sqlite":
        return connection.execute(sa.text("SELECT (julianday('now') - 2440587.5) * 86400.0")).scalar_one()
    return float(connection.execute(sa.select(sa.extract("epoch", sa.func.clock_timestamp()))).scalar_one())


def parse_url(url: str) -> sa.URL:
    """The URL, if a door knows its scheme; `ConfigError` says what would do."""
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError:
        raise ConfigError(f"store.url: {url!r} is not a URL; use sqlite:///PATH or postgresql://...") from None
    if parsed.drivername not in BACKENDS:
        raise ConfigError(f"store.url: no database of kind {parsed.drivername!r}; known: {', '.join(BACKENDS)}")
    return parsed


_SCHEMA_LOCK = 0x726F6C6C  # "roll": one process at a time makes tables


def _create(connection: sa.Connection, metadata: sa.MetaData) -> None:
    lock_schema(connection)
    metadata.create_all(connection)


def lock_schema(connection: sa.Connection) -> None:
    """Until the transaction's end no other process makes or changes tables."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
