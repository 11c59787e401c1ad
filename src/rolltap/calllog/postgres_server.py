"""Checks that a connection's Postgres server is the one that holds the store, and takes writes.

After a failover or a restore, an open connection may lead to a server that still answers but is the wrong one. A server
is wrong if it is in recovery (a standby), if its transactions are read-only, if its timeline is older than one seen
before (another server was promoted since), or if it belongs to another cluster than at this process's start.

A database that is opened read-only may be a standby, if it was one at the first connection.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from rolltap.calllog.dberrors import RETRY_AFTER_S
from rolltap.errors import StoreUnavailable

TRUST_S = 1.0
"""Seconds for which a server's answer is trusted."""

ANSWERS_WITHIN_S = 3.0

WRONG_SERVER = ("25006", "28000", "28P01", "3D000", "57P01", "57P02", "57P03")
"""SQLSTATEs after which every connection is checked: the server is read-only, refuses the login, lacks the database, or
stops and starts."""

_STATE = """
SELECT pg_is_in_recovery() AS recovering, current_setting('transaction_read_only') = 'on' AS read_only,
  (SELECT system_identifier FROM pg_control_system()) AS cluster,
  CASE WHEN pg_is_in_recovery() THEN 0
    ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END AS timeline,
  extract(epoch FROM clock_timestamp())::float8 AS now
"""


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server says about itself. `timeline` is 0 in recovery; `now` is its clock, in seconds since the epoch."""

    recovering: bool
    read_only: bool
    cluster: int
    timeline: int
    now: float


class ServerCheck:
    """The check of all connections of one process to the store `name`."""

    def __init__(self, name: str, *, writable: bool) -> None:
        self._name = name
        self._needs_primary = writable
        self._cluster: int | None = None
        self._timeline = 0
        self._timelines: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by connection
        self._doubted_at = 0.0
        self._clock: tuple[float, float] | None = None  # the server's time, and the monotonic time of that answer

    def time(self) -> float:
        """The server's clock, in seconds since the epoch. Steps of this machine's clock do not change it."""
        if self._clock is None:
            return time.time()
        served, answered_at = self._clock
        return served + time.monotonic() - answered_at

    def doubt(self) -> None:
        """Checks every connection again before its next use."""
        self._doubted_at = time.monotonic()

    def doubts(self, state: str) -> bool:
        """Whether an error with this SQLSTATE means that the server may be wrong. Then all connections are doubted."""
        if state in WRONG_SERVER or state.startswith("08"):
            self.doubt()
            return True
        return False

    async def of(self, driver: Any, info: dict[str, Any]) -> None:
        """Checks the server of an asyncpg connection, unless `info`, which is kept with it, has a recent answer.

        Raises `StoreUnavailable` if the server is wrong or does not answer.
        """
        now = time.monotonic()
        checked_at = info.get("checked_at", 0.0)
        if checked_at > self._doubted_at and now < checked_at + TRUST_S:
            return
        try:
            row = await driver.fetchrow(_STATE, timeout=ANSWERS_WITHIN_S)
        except (*driver_errors(), OSError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            raise StoreUnavailable(f"{self._name}: {reason}", retry_after=RETRY_AFTER_S) from error
        except asyncio.CancelledError:
            driver.terminate()  # whoever gave up waiting is not to get the same silent connection again
            raise
        self._clock = row["now"], time.monotonic()
        self.judge(ServerState(**dict(row)))
        self._timelines[driver] = row["timeline"]
        info["checked_at"] = now

    def _leave_older(self) -> None:
        """Ends connections to servers of older timelines, also in a statement: a commit may wait for ever there."""
        for driver, timeline in list(self._timelines.items()):
            if timeline < self._timeline:
                driver.terminate()

    def judge(self, server: ServerState) -> None:
        """Raises `StoreUnavailable` if this is not the server to use."""
        if self._cluster is None:
            self._cluster = server.cluster
            self._needs_primary = self._needs_primary or not (server.recovering or server.read_only)
        wrong = ""
        if server.cluster != self._cluster:
            wrong = (
                f"the server belongs to another cluster ({server.cluster}) than at the start ({self._cluster}); if the "
                "store has moved there, restart rolltap"
            )
        elif self._needs_primary and server.recovering:
            wrong = "the server is in recovery: it is a standby, or still starts"
        elif self._needs_primary and server.read_only:
            wrong = "the server is read-only (default_transaction_read_only)"
        elif self._needs_primary and server.timeline < self._timeline:
            wrong = f"another server was promoted since: timeline {server.timeline}, and {self._timeline} was seen"
        if wrong:
            raise StoreUnavailable(f"{self._name}: {wrong}", retry_after=RETRY_AFTER_S)
        if server.timeline > self._timeline:
            self._timeline = server.timeline
            self._leave_older()


def driver_errors() -> tuple[type[Exception], ...]:
    """What asyncpg raises where a statement fails, or a connection broke off in the middle of one. The last kind is its
    word for a fault of its own, and comes when a server is shut down under load."""
    import asyncpg

    return asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError


def sql_state(error: BaseException | None) -> str:
    """The SQLSTATE of a driver's error; empty if it has none."""
    return str(getattr(error, "sqlstate", None) or "")
