"""Proxies on one store have the same keys: a new one looks at those that run, and refuses to start apart from them.

Postgres tells every client the names of the others' connections. A proxy's name holds marks of its keys, from which
they can't be found again. On SQLite a store has one server.
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
from rolltap.errors import ConfigError
from rolltap.settings import KeySettings

log = logging.getLogger("rolltap.app")

GONE_WITHIN_S = 3.0
"""So long may a process that has just ended still stand among the connections."""

_PREFIX = "rolltap proxy"
_PEERS = sa.text(
    "SELECT DISTINCT application_name FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name LIKE :prefix"
).bindparams(prefix=f"{_PREFIX} %")


@dataclass(frozen=True, slots=True)
class KeysMark:
    """Says whether two proxies have the same secret and the same keys, and nothing else of them."""

    of_secret: str
    of_others: str

    @classmethod
    def of(cls, keys: KeySettings) -> Self:
        others = keys.model_dump(exclude={"secret"})
        return cls(_mark(keys.secret), _mark(*(f"{name}={others[name]}" for name in sorted(others))))

    @property
    def application(self) -> str:
        """The name of a proxy's connections; Postgres keeps 63 bytes of it."""
        return f"{_PREFIX} {self.of_secret} {self.of_others}"


def _mark(*texts: str) -> str:
    return hashlib.scrypt("\0".join(texts).encode(), salt=_PREFIX.encode(), n=2**12, r=8, p=1, dklen=8).hex()


async def check_peers(database: Database, mark: KeysMark) -> None:
    """`ConfigError` if a proxy with another secret works on this store; a warning if its other keys differ."""
    if database.dialect_name == "sqlite":
        return
    by = time.monotonic() + GONE_WITHIN_S
    while True:
        names = await database.query(lambda connection: connection.execute(_PEERS).scalars().all())
        peers = [name.removeprefix(f"{_PREFIX} ").split() for name in names]
        if all(of_secret == mark.of_secret for of_secret, _ in peers):
            break
        if time.monotonic() > by:
            raise ConfigError(
                f"another proxy works on {database.name} with another keys.secret, and neither would know the other's "
                "sessions: give both the same keys ([keys], or ROLLTAP_KEYS__SECRET and so on); to change them, stop "
                "all proxies of this store first"
            )
        await asyncio.sleep(0.1)
    if any(of_others != mark.of_others for _, of_others in peers):
        log.warning(
            "another proxy on %s has other keys than this one: a client's key is known to one of them only; give all "
            "proxies the same [keys]",
            database.name,
        )
