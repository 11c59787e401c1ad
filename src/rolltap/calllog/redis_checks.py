"""Checks that a Redis can hold a store's ingest stream: it is durable, and no other store uses it."""

from __future__ import annotations

import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rolltap.errors import ConfigError

log = logging.getLogger("rolltap.store")

OLDEST_VERSION = (6, 2)

OWNER = "rolltap:store"
"""The Redis key with the id of the store that owns the stream."""


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
        log.warning("%s does not show its settings (%s): make sure that it has %s", url, error, required)
        return
    wrong = {name: value for name, value in required.items() if settings.get(name) != value}
    if wrong:
        orders = "; ".join(f"CONFIG SET {name} {value}" for name, value in wrong.items())
        raise ConfigError(f"{url} can lose acknowledged calls; set this in redis.conf or with: {orders}")
    if info.get("aof_last_write_status") != "ok":
        raise ConfigError(f"{url} cannot write its append-only file; see its log")


async def check_stream_owner(redis: Redis, url: str, store: str) -> None:
    """Refuses the Redis of another store, as a sweep would write that store's calls to this one."""
    await redis.set(OWNER, store, nx=True)
    owner: Any = await redis.get(OWNER)
    if owner != store.encode():
        raise ConfigError(
            f"{url} is the ingest stream of another store, which would get this store's calls: give each store its own "
            f"Redis database (redis://HOST:PORT/DB). If your store was restored or upgraded, run in Redis: DEL {OWNER}"
        )
