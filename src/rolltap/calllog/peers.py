"""Checks that all proxies on one Postgres store have the same keys: a new one with another secret refuses to start.

Postgres shows every client the names of all connections. A proxy's connection name contains hashes of its keys, which
cannot be reversed. A SQLite store has only one server.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass
from typing import Self

import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.calllog.schema import VERSION
from rolltap.calllog.versions import PROXY
from rolltap.errors import ConfigError
from rolltap.settings import KeySettings

log = logging.getLogger("rolltap.app")

GONE_WITHIN_S = 3.0
"""Seconds for which a process that has just ended may still be listed among the connections."""

_PEERS = sa.text(
    "SELECT DISTINCT application_name FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name LIKE :prefix"
).bindparams(prefix=f"{PROXY} %")


@dataclass(frozen=True, slots=True)
class KeysMark:
    """Hashes to compare the secret and the other keys of two proxies."""

    of_secret: str
    of_others: str

    @classmethod
    def of(cls, keys: KeySettings) -> Self:
        others = keys.model_dump(exclude={"secret"})
        return cls(_mark(keys.secret), _mark(*(f"{name}={others[name]}" for name in sorted(others))))

    @property
    def application(self) -> str:
        """The name of a proxy's connections. Postgres truncates it to 63 bytes."""
        return f"{PROXY} {self.of_secret} {self.of_others} {VERSION}"


def _mark(*texts: str) -> str:
    return hashlib.scrypt("\0".join(texts).encode(), salt=PROXY.encode(), n=2**12, r=8, p=1, dklen=8).hex()


async def check_peers(database: Database, mark: KeysMark) -> None:
    """Raises `ConfigError` if another proxy on this store has another secret; warns if its other keys differ."""
    if database.dialect_name == "sqlite":
        return
    by = time.monotonic() + GONE_WITHIN_S
    while True:
        names = await database.query(lambda connection: connection.execute(_PEERS).scalars().all())
        peers = [name.removeprefix(f"{PROXY} ").split()[:2] for name in names]
        if all(of_secret == mark.of_secret for of_secret, _ in peers):
            break
        if time.monotonic() > by:
            raise ConfigError(
                f"another proxy on {database.name} has a different keys.secret, so neither would find the other's "
                "sessions: give both the same keys ([keys], or ROLLTAP_KEYS__SECRET and so on); to change them, stop "
                "all proxies of this store first"
            )
        await asyncio.sleep(0.1)
    if any(of_others != mark.of_others for _, of_others in peers):
        log.warning(
            "another proxy on %s has different keys, so only one of the two accepts a client's key; give all proxies "
            "the same [keys]",
            database.name,
        )
