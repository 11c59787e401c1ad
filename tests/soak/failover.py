"""A Postgres or Redis of a soak that fails over: a standby is made and promoted, and the old primary goes.

That of Postgres is synchronous. Redis has none: proxies keep what it may have lost in memory, until Postgres has it.
"""

from __future__ import annotations

import asyncio
import pwd
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
from redis.asyncio import Redis
from redis.exceptions import RedisError

from rolltap.deployment.description import PROXIES
from rolltap.deployment.local import Child

from ..conftest import free_port, program
from .world import HOMES, World

UP_WITHIN_S = 60.0
KINDS = ("killed", "read-only", "unfenced")
"""What the old primary is while the standby is promoted. An unfenced one serves on: whoever stays with it is alone."""


async def fail_over(world: World, kind: str) -> None:
    """Leads the proxies to a new primary that has every acknowledged commit of the old one."""
    old = world.child("postgres")
    new = await _standby_of(world, old)
    world.deployment.children["standby"] = new
    await _order(world, old, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
    await _until(world, old, "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
    await asyncio.sleep(2)
    old.wanted = False
    if kind == "read-only":
        await _order(world, old, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    elif kind == "killed":
        old.signal(signal.SIGQUIT)
    await _order(world, new, "SELECT pg_promote()")
    for proxy in PROXIES:
        world.relays[proxy, "postgres"].port = _port(new)
    world.deployment.children["postgres"] = world.deployment.children.pop("standby")
    await asyncio.sleep(world.rng.uniform(3, 6))
    old.signal(signal.SIGQUIT)
    await asyncio.to_thread(old.wait, UP_WITHIN_S)


async def fail_over_redis(world: World) -> None:
    """Leads the proxies to a promoted replica; the old primary has been killed."""
    old = world.child("redis")
    new, old_port = _replica_of(world, old), world.relays[PROXIES[0], "redis"].port
    async with Redis(port=_redis_port(new), password=world.secrets["redis_password"]) as client:
        await _until_redis(client, "loading", 0)
        await client.config_set("masterauth", world.secrets["redis_password"])
        await client.replicaof("127.0.0.1", old_port)
        await _until_redis(client, "master_link_status", "up")
        await asyncio.sleep(2)
        old.wanted = False
        old.signal(signal.SIGKILL)
        await client.replicaof("NO", "ONE")
    for proxy in PROXIES:
        world.relays[proxy, "redis"].port = _redis_port(new)
    world.deployment.children["redis"] = world.deployment.children.pop("replica")
    await asyncio.to_thread(old.wait, UP_WITHIN_S)


def _replica_of(world: World, primary: Child) -> Child:
    """Another Redis with the primary's settings on the other one of the two disks, started; not yet its replica."""
    home = _other_home(world, "redis", primary)
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    settings = Path(primary.command[-1]).read_text()
    settings = re.sub(r"^port .*$", f'port "{free_port()}"', settings, flags=re.MULTILINE)
    settings = re.sub(r"^dir .*$", f'dir "{home}"', settings, flags=re.MULTILINE)
    (home / "redis.conf").write_text(settings)
    replica = replace(primary, command=[primary.command[0], str(home / "redis.conf")], process=None)
    world.deployment.children["replica"] = replica
    replica.start()
    return replica


def _redis_port(child: Child) -> int:
    found = re.search(r'^port "(\d+)"$', Path(child.command[-1]).read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1])


async def _until_redis(client: Redis, field: str, value: object) -> None:
    async with asyncio.timeout(UP_WITHIN_S):
        while True:
            with suppress(RedisError, OSError):
                if (await client.info())[field] == value:
                    return
            await asyncio.sleep(0.1)


def home_of(child: Child) -> Path:
    """The folder of a Postgres or a Redis."""
    if child.name == "redis":
        return Path(child.command[-1]).parent
    return Path(child.command[child.command.index("-D") + 1])


def _other_home(world: World, service: str, primary: Child) -> Path:
    return next(one for one in map(world.deployment.folder.joinpath, HOMES[service]) if one != home_of(primary))


async def _standby_of(world: World, primary: Child) -> Child:
    """A streaming standby on the other one of the two disks, started."""
    port = free_port()
    home = _other_home(world, "postgres", primary)
    command = [program("pg_basebackup"), "-d", f"{_address(world, primary)} dbname=postgres", "-D", str(home)]
    await asyncio.to_thread(_copy, command, home, primary.user)
    own = [*primary.command]
    own[own.index("-D") + 1] = str(home)
    own[own.index(f"port={_port(primary)}")] = f"port={port}"
    standby = replace(primary, command=[*own, "-c", "wal_retrieve_retry_interval=500ms"], process=None)
    standby.start()
    await _until(world, standby, "SELECT pg_is_in_recovery()")
    return standby


def _copy(command: list[str], home: Path, user: str | None) -> None:
    if user:
        shutil.chown(home, pwd.getpwnam(user).pw_uid)
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run([*command, "-R", "-c", "fast", "--no-sync"], user=user, cwd="/", check=True)


def _port(child: Child) -> int:
    return int(next(part for part in child.command if part.startswith("port=")).removeprefix("port="))


def _address(world: World, child: Child) -> str:
    return f"host=127.0.0.1 port={_port(child)} user=postgres password={world.secrets['superuser_password']}"


async def _order(world: World, child: Child, *orders: str) -> Any:
    """What the last of them gives."""
    connection = await asyncpg.connect(
        host="127.0.0.1",
        port=_port(child),
        user="postgres",
        password=world.secrets["superuser_password"],
        database="postgres",
        server_settings={"synchronous_commit": "local"},
    )
    try:
        return [await connection.fetchval(order) for order in orders][-1]
    finally:
        await connection.close()


async def _until(world: World, child: Child, question: str) -> None:
    async with asyncio.timeout(UP_WITHIN_S):
        while True:
            try:
                if await _order(world, child, question):
                    return
            except (OSError, asyncpg.PostgresError):
                assert child.alive, child.tail()
            await asyncio.sleep(0.1)
