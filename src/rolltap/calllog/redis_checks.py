"""Whether a Redis can be the ingest stream of a store: it loses nothing, and no other store uses it."""

from __future__ import annotations

import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rolltap.errors import ConfigError

log = logging.getLogger("rolltap.store")

OLDEST_VERSION = (6, 2)

OWNER = "rolltap:store"
"""The key that names the store whose facts the stream holds."""


async def check_settings(redis: Redis, url: str) -> None:
    """Refuses a Redis that can lose what it acknowledged."""
    info: dict[str, Any] = await redis.info()
    version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
    if version < OLDEST_VERSION:
        raise ConfigError(f"{url}: Redis {info['redis_version']} is too old; 6.2 or later is needed")
    required = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    try:
        settings = await redis.config_get(*required)
    except ResponseError as error:
        log.warning("%s hides its settings (%s): make sure of %s", url, error, required)
        return
    wrong = {name: value for name, value in required.items() if settings.get(name) != value}
    if wrong:
        orders = "; ".join(f"CONFIG SET {name} {value}" for name, value in wrong.items())
        raise ConfigError(f"{url} can lose acknowledged calls; set this in redis.conf or by: {orders}")
    if info.get("aof_last_write_status") != "ok":
        raise ConfigError(f"{url} can't write its append-only file; see its log")


async def claim(redis: Redis, url: str, store: str) -> None:
    """Refuses the Redis of another store: whoever sweeps would write that one's calls to this one."""
    await redis.set(OWNER, store, nx=True)
    owner: Any = await redis.get(OWNER)
    if owner != store.encode():
        raise ConfigError(
            f"{url} is the ingest stream of another store, and calls would go astray: give each its own Redis database "
            f"(redis://HOST:PORT/DB). If your store was restored or upgraded since, say so to Redis by: DEL {OWNER}"
        )
