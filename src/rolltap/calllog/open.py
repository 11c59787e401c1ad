"""Opens a call log by URL."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rolltap.calllog.facts import CallLog
from rolltap.errors import ConfigError
from rolltap.extras import install_line

if TYPE_CHECKING:
    from rolltap.calllog.database import Database
    from rolltap.calllog.writing import GroupWriter

SPOOL_BYTES = 64_000_000


@runtime_checkable
class LogWithDatabase(CallLog, Protocol):
    """A call log whose database the ledger shares."""

    database: Database
    refused: int

    async def end_predecessor(self, process: str, *, at: float) -> int:
        """Ends the process that had this one's spool before; returns the number of its calls that are aborted now."""
        ...

    async def settled(self) -> None:
        """Waits until all appended facts can be read from the store. Raises `StoreUnavailable` if that takes long."""
        ...

    async def peers_behind(self, within_s: float) -> list[str]:
        """Waits for other processes' facts, at most `within_s`; returns the processes that may still have some."""
        ...


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The arguments of `open_call_log`."""

    url: str
    writable: bool
    spools: Sequence[Path]
    spool_bytes: int
    ingest: str | None
    application: str
    connections: int


def _memory(options: LogOptions) -> CallLog:
    from rolltap.calllog.memory import MemoryCallLog

    return MemoryCallLog()


def _sql(options: LogOptions) -> CallLog:
    from rolltap.calllog.database import Database
    from rolltap.calllog.spool import Spool, SpoolWriter
    from rolltap.calllog.sql import SqlCallLog

    database = Database(
        options.url, writable=options.writable, application=options.application, connections=options.connections
    )

    def wrap(writer: GroupWriter) -> GroupWriter:
        if options.ingest is not None:
            writer = _ingest(options.ingest, writer, database)
        if options.spools:
            own, *others = options.spools
            writer = SpoolWriter(writer, Spool(own, options.spool_bytes), others=others)
        return writer

    return SqlCallLog(database, wrap=wrap)


STORES: Mapping[str, Callable[[LogOptions], CallLog]] = {"memory": _memory, "sqlite": _sql, "postgresql": _sql}


def open_call_log(
    url: str,
    *,
    writable: bool = True,
    spools: Sequence[Path] = (),
    spool_bytes: int = SPOOL_BYTES,
    ingest: str | None = None,
    application: str = "rolltap",
    connections: int = 20,
) -> CallLog:
    """The call log at `memory:`, `sqlite:///PATH` or `postgresql://...`, not yet started.

    * `writable=False`: read-only, while another process writes.
    * `spools`: the first is this process's spool file, which keeps facts while the store is unavailable and takes
      `spool_bytes` of disk at once. The others belong to other processes of this machine that write to the same store:
      readers wait until they are empty too.
    * `ingest`: the URL of a Redis whose stream makes facts durable before they are written to Postgres.
    * `application`, `connections`: the name of the connections on Postgres, and how many there are at most.
    """
    scheme = url.partition(":")[0]
    if scheme not in STORES:
        raise ConfigError(f"store.url: no store of kind {scheme!r}; known: {', '.join(STORES)}")
    if ingest is not None and scheme != "postgresql":
        raise ConfigError(f"store.ingest: a Redis stream works with a Postgres store, not with {scheme}")
    return STORES[scheme](LogOptions(url, writable, spools, spool_bytes, ingest, application, connections))


def _ingest(url: str, writer: GroupWriter, database: Database) -> GroupWriter:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"store.ingest: {url!r} is not a Redis URL; use redis://HOST:PORT/DB")
    if importlib.util.find_spec("redis") is None:
        raise ConfigError(f"store.ingest: Redis needs its client: {install_line('redis')}")
    from rolltap.calllog.redis import IngestWriter

    return IngestWriter(url, writer, store_id=database.identity)
