"""Compares the proxies on one Postgres store: a new one with another secret refuses to start; other keys or policies
are warned of, by all of them.

Postgres shows every client the names of all connections. A proxy's connection name contains hashes of its keys and of
its policies' names, which cannot be reversed. A SQLite store has only one server.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.calllog.schema import VERSION
from rolltap.calllog.versions import PROXY
from rolltap.errors import ConfigError, StoreError
from rolltap.settings import KeySettings

log = logging.getLogger("rolltap.app")

GONE_WITHIN_S = 3.0
"""Seconds for which a process that has just ended may still be listed among the connections."""

LOOK_EVERY_S = 15.0

_PEERS = sa.text(
    "SELECT DISTINCT application_name FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name LIKE :prefix"
).bindparams(prefix=f"{PROXY} %")


@dataclass(frozen=True, slots=True)
class KeysMark:
    """Hashes to compare the secret, the other keys and the policies' names of two proxies."""

    of_secret: str = ""
    of_others: str = ""
    of_policies: str = ""

    @classmethod
    def of(cls, keys: KeySettings, policies: Iterable[str] = ()) -> Self:
        others = keys.model_dump(exclude={"secret"})
        of_others = _mark(*(f"{name}={others[name]}" for name in sorted(others)))
        names = hashlib.blake2b("\0".join(sorted(policies)).encode(), digest_size=4).hexdigest()
        return cls(_mark(keys.secret), of_others, names)

    @property
    def application(self) -> str:
        """The name of a proxy's connections. Postgres truncates it to 63 bytes."""
        return f"{PROXY} {self.of_secret} {self.of_others} {VERSION} {self.of_policies}"


def _mark(*texts: str) -> str:
    """Slow on purpose, as everybody on that server could try keys against it: 30 ms."""
    return hashlib.scrypt("\0".join(texts).encode(), salt=PROXY.encode(), n=2**12, r=8, p=1, dklen=8).hex()


class PeersCheck:
    """Compares this proxy with the others on its store, at the start and every `LOOK_EVERY_S`."""

    def __init__(self, database: Database, mark: KeysMark) -> None:
        self._database = database
        self._mark = mark
        self.differences: Mapping[str, str] = {}
        """What another proxy has otherwise, and what to do about it: as of the last look."""

    async def check_start(self) -> None:
        """Raises `ConfigError` if another proxy has another secret; warns of other differences."""
        by = time.monotonic() + GONE_WITHIN_S
        while any(peer[0] != self._mark.of_secret for peer in await self._peers()):
            if time.monotonic() > by:
                raise ConfigError(
                    f"another proxy on {self._database.name} has a different keys.secret, so neither would find the "
                    "other's sessions: give both the same keys ([keys], or ROLLTAP_KEYS__SECRET and so on); to change "
                    "them, stop all proxies of this store first"
                )
            await asyncio.sleep(0.1)
        await self.look()

    async def watch(self) -> None:
        """Looks again and again: a proxy that starts later with other keys is noticed by those that run."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with suppress(StoreError):
                await self.look()

    async def look(self) -> Mapping[str, str]:
        """The differences now. A new one is logged."""
        before, self.differences = self.differences, self._compared(await self._peers())
        for what, remedy in self.differences.items():
            if what not in before:
                log.warning("another proxy on %s %s: %s", self._database.name, what, remedy)
        return self.differences

    def _compared(self, peers: Iterable[list[str]]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for _, others, *rest in peers:
            if others != self._mark.of_others:
                found["has different keys"] = (
                    "only one of the two accepts a client's key; give all proxies the same [keys]"
                )
            if rest[1:] and rest[1] != self._mark.of_policies:
                found["has other policies"] = (
                    "calls of a policy that it lacks get 404 there; give all proxies the same [policies]"
                )
        return found

    async def _peers(self) -> list[list[str]]:
        """The words of the other proxies' marks: secret, other keys, schema, policies. Older proxies lack the last."""
        if self._database.dialect_name == "sqlite":
            return []
        names = await self._database.query(lambda connection: connection.execute(_PEERS).scalars().all())
        return [words for name in names if len(words := name.removeprefix(f"{PROXY} ").split()) >= 2]
