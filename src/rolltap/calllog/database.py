"""Database access for the call log and the ledger.

`Database(url)` connects to SQLite (`sqlite:///path`) or Postgres (`postgresql://...`) through SQLAlchemy Core:

    async with db.write() as connection:      # one transaction, committed at exit, rolled back on any error
        result = await connection.execute(update(leases).where(...).values(...))
    async with db.read() as connection:       # a read-only snapshot
        rows = (await connection.execute(select(groups))).all()

`transact` and `query` do the same with a plain function of a synchronous SQLAlchemy connection. They switch threads
once instead of once per statement, so the hot path uses them.

Invariants:

* When `write` or `transact` returns, the transaction is durable: with `Durability.POWER` it survives loss of power,
  with `Durability.PROCESS` the death of this process.
* On SQLite only one connection of one process writes (see `rolltap.calllog.sqlite`). On Postgres transactions run
  concurrently at READ COMMITTED, and reads in a REPEATABLE READ snapshot.
* A cancelled caller never leaves a transaction open.
* Database errors are raised only as `StoreUnavailable`, `RecordCorrupt` or `ConfigError`.
"""

from __future__ import annotations

import time
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

CONNECTIONS = 20
"""Most connections to Postgres of a process that is not told otherwise."""

_IDENTITY = sa.select(
    sa.literal_column("(SELECT system_identifier FROM pg_control_system()) || '-' || oid")
).select_from(sa.text("pg_database WHERE datname = current_database()"))


class Durability(StrEnum):
    """The failure that a committed transaction must survive."""

    PROCESS = "process"  # kill -9 of this process
    POWER = "power"  # loss of power as well


class Connection(Protocol):
    """A connection inside a transaction."""

    async def execute(self, statement: sa.Executable, parameters: Parameters = None) -> CursorResult[Any]:
        """Runs a statement, once for each item of a sequence of parameters. The result is buffered.

        `rowcount` is valid for UPDATE or DELETE without RETURNING; with RETURNING, count the rows.
        """
        ...

    async def scalar(self, statement: sa.Executable, parameters: Parameters = None) -> Any:
        """The first column of the first row, or None."""
        ...

    async def run(self, work: Work[T]) -> T:
        """Runs `work` on the synchronous connection. It may block only on the database."""
        ...

    async def now(self) -> float:
        """The database's clock, in seconds since the epoch."""
        ...


class Backend(Protocol):
    """Implements `Database` for one kind of database."""

    dialect: sa.Dialect

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def write(self, durability: Durability) -> AbstractAsyncContextManager[Connection]: ...

    def read(self) -> AbstractAsyncContextManager[Connection]: ...

    async def transact(self, work: Work[T], durability: Durability) -> T: ...

    async def query(self, work: Work[T]) -> T: ...

    async def select(self, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]: ...

    async def insert(self, rows: Mapping[Insert, Sequence[Row]], durability: Durability) -> Sequence[int]: ...

    async def check(self) -> None: ...

    def time(self) -> float: ...

    @property
    def connections(self) -> tuple[int, int] | None: ...


def _sqlite(url: sa.URL, writable: bool, application: str, connections: int) -> Backend:
    from rolltap.calllog.sqlite import SqliteBackend

    return SqliteBackend(url, writable=writable)


def _postgres(url: sa.URL, writable: bool, application: str, connections: int) -> Backend:
    from rolltap.calllog.postgres import PostgresBackend

    return PostgresBackend(url, writable=writable, application=application, connections=connections)


BACKENDS: Mapping[str, Callable[[sa.URL, bool, str, int], Backend]] = {"sqlite": _sqlite, "postgresql": _postgres}


class Database:
    """A database: see the module. With `writable=False` it is read-only, and another process may write.

    `application` is the name of the connections on Postgres, `connections` how many there are at most.
    """

    def __init__(
        self, url: str, *, writable: bool = True, application: str = APPLICATION, connections: int = CONNECTIONS
    ) -> None:
        self.url = parse_url(url)
        self.name = self.url.render_as_string(hide_password=True)
        self.writable = writable
        self._backend = BACKENDS[self.url.drivername](self.url, writable, application, connections)

    @property
    def dialect(self) -> sa.Dialect:
        """For rendering statements ahead of time."""
        return self._backend.dialect

    @property
    def dialect_name(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._backend.dialect.name

    @property
    def connections(self) -> tuple[int, int] | None:
        """Connections to Postgres that are in use, and the most that there may be. None on SQLite."""
        return self._backend.connections

    async def start(self, metadata: sa.MetaData | None = None) -> None:
        """Connects and creates missing tables of `metadata`. Closes itself if that fails."""
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
        """A write transaction. On SQLite there is only one at a time."""
        self._check_writable()
        async with self._backend.write(durability) as connection:
            yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Connection]:
        """A read-only snapshot."""
        async with self._backend.read() as connection:
            yield connection

    async def transact(self, work: Work[T], durability: Durability = Durability.POWER) -> T:
        """Runs `work` in its own transaction and commits."""
        self._check_writable()
        return await self._backend.transact(work, durability)

    async def query(self, work: Work[T]) -> T:
        """Runs `work` on a read-only snapshot."""
        return await self._backend.query(work)

    async def select(self, statement: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """The rows of a single statement, without a transaction: on Postgres one round trip instead of three."""
        return await self._backend.select(statement)

    async def insert(self, rows: Mapping[Insert, Sequence[Row]], durability: Durability) -> Sequence[int]:
        """Runs the inserts in one transaction; returns for each the number of new or replaced rows.

        It bypasses SQLAlchemy: on Postgres one round trip and half the CPU time of `transact`.
        """
        self._check_writable()
        return await self._backend.insert(rows, durability)

    async def check(self) -> None:
        """Raises `StoreUnavailable` unless a server answers now that can do what this database was opened for."""
        await self._backend.check()

    def time(self) -> float:
        """The database's clock, in seconds since the epoch, without asking it: as it follows from its last answer."""
        return self._backend.time()

    @property
    def clock_ahead_s(self) -> float:
        """How far this machine's clock is ahead of the database's, in seconds."""
        return time.time() - self.time()

    async def now(self) -> float:
        """The database's clock, in seconds since the epoch. In a transaction, use its connection's `now`."""
        async with self._backend.read() as connection:
            return await connection.now()

    async def identity(self) -> str:
        """An identifier of this Postgres database, unique among all servers. A restored dump has another one."""
        ((identity,),) = await self.select(_IDENTITY)
        return identity

    def _check_writable(self) -> None:
        if not self.writable:
            raise ConfigError(f"{self.name} was opened read-only")


def database_clock(connection: sa.Connection) -> float:
    """The database server's time in seconds since the epoch (for SQLite, this machine's)."""
    if connection.dialect.name == "sqlite":
        return connection.execute(sa.text("SELECT (julianday('now') - 2440587.5) * 86400.0")).scalar_one()
    return float(connection.execute(sa.select(sa.extract("epoch", sa.func.clock_timestamp()))).scalar_one())


def parse_url(url: str) -> sa.URL:
    """Parses a store URL. Raises `ConfigError`, which lists the known schemes."""
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError:
        raise ConfigError(f"store.url: {url!r} is not a URL; use sqlite:///PATH or postgresql://...") from None
    if parsed.drivername not in BACKENDS:
        raise ConfigError(f"store.url: no database of kind {parsed.drivername!r}; known: {', '.join(BACKENDS)}")
    return parsed


_SCHEMA_LOCK = 0x726F6C6C  # "roll": advisory lock; one process at a time changes the schema


def _create(connection: sa.Connection, metadata: sa.MetaData) -> None:
    lock_schema(connection)
    metadata.create_all(connection)


def lock_schema(connection: sa.Connection) -> None:
    """Keeps other processes from changing the schema until the transaction's end."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
