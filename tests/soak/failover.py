"""A Postgres of a soak that fails over: a synchronous standby is made, promoted, and the old primary goes."""

from __future__ import annotations

import asyncio
import pwd
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg

from rolltap.deployment.description import PROXIES
from rolltap.deployment.local import Child

from ..conftest import free_port, program
from .world import POSTGRES_HOMES, World

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


def home_of(child: Child) -> Path:
    return Path(child.command[child.command.index("-D") + 1])


async def _standby_of(world: World, primary: Child) -> Child:
    """A streaming standby on the other one of the two disks, started."""
    port = free_port()
    home = next(one for one in map(world.deployment.folder.joinpath, POSTGRES_HOMES) if one != home_of(primary))
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
