"""What Postgres and Redis say about themselves, for the doctor."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.calllog.schema import processes
from rolltap.errors import ConfigError, StoreUnavailable
from rolltap.tenants import EVERY_TENANT, acting_for

_POSTGRES = sa.text(
    """
SELECT current_setting('server_version') AS version, current_setting('max_connections')::int AS most,
  current_setting('superuser_reserved_connections')::int AS reserved,
  (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS open,
  (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS role_limit,
  current_setting('fsync') = 'on' AND current_setting('full_page_writes') = 'on' AS is_durable,
  pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' AS is_standby
"""
)


@dataclass(frozen=True, slots=True)
class PostgresFacts:
    """`most` is the server's `max_connections`, `role_limit` the store's user's (-1: none), `open` those of now."""

    version: str
    most: int
    reserved: int
    open: int
    role_limit: int
    is_durable: bool
    is_standby: bool

    @property
    def usable(self) -> int:
        """How many connections the store's user may have."""
        for_users = self.most - self.reserved
        return for_users if self.role_limit < 0 else min(for_users, self.role_limit)


@dataclass(frozen=True, slots=True)
class WriterFacts:
    """The processes that write to the store: how many have a row, and how many have facts that are not in it yet."""

    count: int
    behind: int


async def postgres_facts(database: Database) -> PostgresFacts:
    ((row,),) = [await database.query(lambda connection: connection.execute(_POSTGRES).all())]
    return PostgresFacts(**row._mapping)


async def writer_facts(database: Database) -> WriterFacts:
    counts = sa.select(sa.func.count(), sa.func.count(processes.c.waiting_since))
    with acting_for(EVERY_TENANT):
        ((total, behind),) = await database.query(lambda connection: connection.execute(counts).all())
    return WriterFacts(max(1, total), behind)  # this process may have no row yet


async def redis_problem(url: str) -> tuple[str, str]:
    """What the Redis at `url` is, and what is wrong with its settings ("" if nothing is)."""
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    from rolltap.calllog.redis_checks import check_settings
    from rolltap.settings import hide_password

    try:
        async with Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3) as redis:
            info = await redis.info()
            await check_settings(redis, hide_password(url))
            waiting = await redis.xlen("rolltap:calls")
            refused = await redis.xlen("rolltap:refused")
    except ConfigError as error:
        return "refused at a start", error.message
    except (RedisError, OSError) as error:
        raise StoreUnavailable(f"{hide_password(url)}: {error}") from error
    most = info.get("maxmemory") or info.get("total_system_memory") or 0
    state = f"{info['redis_version']}; {waiting} entries wait; {info['used_memory'] >> 20} of {most >> 20} MB"
    problem = f"{refused} facts that the store refused are in the stream rolltap:refused" if refused else ""
    if most and info["used_memory"] > 0.8 * most:
        problem = "its memory is nearly full: it will refuse calls; raise maxmemory, or find out why Postgres is slow"
    return state, problem
