"""Opens a call log by URL."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rolltap.calllog.database import Database
from rolltap.calllog.spool import Spool, SpoolWriter
from rolltap.calllog.sql import SqlCallLog
from rolltap.calllog.writing import GroupWriter
from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.wording import did_you_mean

SPOOL_BYTES = 64_000_000
STORES = ("sqlite", "postgresql")


def open_call_log(
    url: str,
    *,
    writable: bool = True,
    spools: Sequence[Path] = (),
    spool_bytes: int = SPOOL_BYTES,
    ingest: str | None = None,
    application: str = "rolltap",
    connections: int = 20,
    newer: bool = False,
) -> SqlCallLog:
    """The call log at `sqlite:///PATH` or `postgresql://...`, not yet started.

    * `writable=False`: read-only, while another process writes.
    * `spools`: the first is this process's spool file, which keeps facts while the store is unavailable and takes
      `spool_bytes` of disk at once. The others belong to other processes of this machine that write to the same store:
      readers wait until they are empty too.
    * `ingest`: the URL of a Redis whose stream makes facts durable before they are written to Postgres.
    * `application`, `connections`: the name of the connections on Postgres, and how many there are at most.
    * `newer`: with `writable=False`, a schema of a newer rolltap is read, too: for a proxy that runs. An upgrade that
      it can't live with is refused while it is connected.
    """
    scheme = url.partition(":")[0]
    if scheme not in STORES:
        known = f"{', '.join(STORES)}{did_you_mean(scheme, STORES)}"
        raise ConfigError(f"store.url: no store of kind {scheme!r}; known: {known}")
    if ingest is not None and scheme != "postgresql":
        raise ConfigError(f"store.ingest: a Redis stream works with a Postgres store, not with {scheme}")
    database = Database(url, writable=writable, application=application, connections=connections)

    def wrap(writer: GroupWriter) -> GroupWriter:
        if ingest is not None:
            writer = _ingest(ingest, writer, database)
        if spools:
            own, *others = spools
            writer = SpoolWriter(writer, Spool(own, spool_bytes), others=others)
        return writer

    return SqlCallLog(database, wrap=wrap, newer=newer)


def _ingest(url: str, writer: GroupWriter, database: Database) -> GroupWriter:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"store.ingest: {url!r} is not a Redis URL; use redis://HOST:PORT/DB")
    if importlib.util.find_spec("redis") is None:
        raise ConfigError(f"store.ingest: Redis needs its client: {install_line('redis')}")
    from rolltap.calllog.redis import IngestWriter

    return IngestWriter(url, writer, store_id=database.identity)
