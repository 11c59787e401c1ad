"""Opens a call log by URL."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rolltap.calllog.base import CallLog
from rolltap.errors import ConfigError
from rolltap.extras import install_line

if TYPE_CHECKING:
    from rolltap.calllog.database import Database
    from rolltap.calllog.writing import GroupWriter

SPOOL_BYTES = 64_000_000


@runtime_checkable
class LogWithDatabase(CallLog, Protocol):
    """A call log in whose database the ledger has room."""

    database: Database

    async def settled(self) -> None:
        """Returns when all that was written can be read from the store; `StoreUnavailable` if that takes long."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call log is, and what stands before it. See `open_call_log`."""

    url: str
    writable: bool
    spools: Sequence[Path]
    spool_bytes: int
    ingest: str | None
    application: str


def _memory(place: Place) -> CallLog:
    from rolltap.calllog.memory import MemoryCallLog

    return MemoryCallLog()


def _sql(place: Place) -> CallLog:
    from rolltap.calllog.database import Database
    from rolltap.calllog.spool import Spool
    from rolltap.calllog.spool_writer import SpoolWriter
    from rolltap.calllog.sql import SqlCallLog

    database = Database(place.url, writable=place.writable, application=place.application)

    def wrap(writer: GroupWriter) -> GroupWriter:
        if place.ingest is not None:
            writer = _ingest(place.ingest, writer, database)
        if place.spools:
            own, *beside = place.spools
            writer = SpoolWriter(writer, Spool(own, place.spool_bytes), beside=beside)
        return writer

    return SqlCallLog(database, wrap=wrap)


STORES: Mapping[str, Callable[[Place], CallLog]] = {"memory": _memory, "sqlite": _sql, "postgresql": _sql}


def open_call_log(
    url: str,
    *,
    writable: bool = True,
    spools: Sequence[Path] = (),
    spool_bytes: int = SPOOL_BYTES,
    ingest: str | None = None,
    application: str = "rolltap",
) -> CallLog:
    """The call log at `memory:`, `sqlite:///PATH` or `postgresql://...`, not yet started.

    With `writable=False` it only reads, beside the process that writes. The first of `spools` is a file of this
    process's own, where facts are kept while the store is away; it takes `spool_bytes` of the disk at once. The others
    are those of other processes on this machine that write to the same store: readers wait until they are empty, too.
    `ingest` is the URL of a Redis whose stream makes facts durable before a Postgres takes them in. Postgres knows the
    connections as those of `application`.
    """
    scheme = url.partition(":")[0]
    if scheme not in STORES:
        raise ConfigError(f"store.url: no store of kind {scheme!r}; known: {', '.join(STORES)}")
    if ingest is not None and scheme != "postgresql":
        raise ConfigError(f"store.ingest: a Redis stream goes before Postgres, not before {scheme}")
    return STORES[scheme](Place(url, writable, spools, spool_bytes, ingest, application))


def _ingest(url: str, writer: GroupWriter, database: Database) -> GroupWriter:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"store.ingest: {url!r} is not a Redis URL; use redis://HOST:PORT/DB")
    if importlib.util.find_spec("redis") is None:
        raise ConfigError(f"store.ingest: Redis needs its client: {install_line('redis')}")
    from rolltap.calllog.redis import IngestWriter

    return IngestWriter(url, writer, store_id=database.identity)
