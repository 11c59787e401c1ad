"""A proxy on a store, an engine, and clients: what a scenario plays in."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from redis.asyncio import Redis

from ..conftest import PostgresServer, RedisServer
from .clients import Clients
from .invariants import check
from .processes import EngineProcess, Forker, Proxy
from .relay import Relay


@dataclass(eq=False)
class Bench:
    """What all worlds of a run share: the forker, the engine, and servers, each started when first asked for."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rolltap-faults-")))
    _parts: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # a part may be asked for, and closed, in any thread
    _closed: bool = False
    _database: str = ""

    def part(self, kind: type[Any]) -> Any:
        with self._lock:
            assert not self._closed
            if kind.__name__ not in self._parts:
                self._parts[kind.__name__] = kind()
                if kind in (PostgresServer, RedisServer):
                    self._parts[kind.__name__].start()
            return self._parts[kind.__name__]

    @property
    def postgres(self) -> PostgresServer:
        return self.part(PostgresServer)

    @property
    def redis(self) -> RedisServer:
        return self.part(RedisServer)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for part in self._parts.values():
                part.remove() if isinstance(part, PostgresServer | RedisServer) else part.close()
        shutil.rmtree(self.folder)

    async def database(self) -> str:
        """The URL of a new Postgres database; the one before is dropped: a server that comes back syncs all it has."""
        import asyncpg

        server = await asyncio.to_thread(lambda: self.postgres)
        name = f"fault_{uuid.uuid4().hex}"
        connection = await asyncpg.connect(server.url())
        if self._database:
            await connection.execute(f"DROP DATABASE {self._database} WITH (FORCE)")
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        self._database = name
        return server.url(name)


@dataclass(frozen=True, eq=False)
class Stage:
    """What is unusual about a world: its folder, how its proxy reaches store and engine, and `store` settings."""

    folder: Path | None = None
    url: str = ""
    engine_url: str = ""
    store: Mapping[str, Any] = field(default_factory=dict)
    relay: Relay | None = None


@dataclass(eq=False)
class World:
    """`size` scales a scenario: how many kills, calls or offsets it takes on."""

    bench: Bench
    store: str
    url: str  # of the database
    proxy: Proxy
    clients: Clients
    rng: random.Random
    size: int
    http: aiohttp.ClientSession
    relay: Relay | None = None
    recovered: list[float] = field(default_factory=list)
    checks: int = 0
    kills: int = 0  # of the proxy, at a named point or after the work
    notes: Counter[str] = field(default_factory=Counter)  # what came how often, for the report
    _back_at: float | None = None
    _journal_from: int = 0  # what the engine was asked before is of other worlds

    def note(self, what: str) -> None:
        self.notes[what] += 1

    def back(self) -> None:
        """What was away is back, or a new process begins: from here on the recovery is timed."""
        self._back_at = time.monotonic()

    async def check(self) -> None:
        """The four invariants; clients may be at work."""
        told = copy.deepcopy(self.clients.told)
        there_at = await check(self.url, told, await self.journal())
        if self._back_at is not None:
            self.recovered.append(there_at - self._back_at)
            self._back_at = None
        self.checks += 1

    async def journal(self) -> list[dict[str, Any]]:
        """What the engine was asked in this world."""
        return (await self._journal(self._journal_from))["requests"]

    async def begin_journal(self) -> None:
        self._journal_from = (await self._journal(sys.maxsize))["count"]

    async def _journal(self, first: int) -> dict[str, Any]:
        url = f"{self.bench.part(EngineProcess).url}/scripted/log?first={first}"
        async with self.http.get(url) as response:
            return json.loads(await response.read())

    def counts(self) -> dict[str, Any]:
        """For the report."""
        return {
            "checks": self.checks,
            "calls": len(self.clients.told.calls),
            "kills": self.kills,
            "recovered": self.recovered,
            "notes": dict(self.notes),
        }

    def assert_no_traceback(self) -> None:
        """No fault may surprise the proxy: what it did not expect, it logs with a traceback."""
        before, found, after = self.proxy.tail(1_000_000).partition("Traceback (most recent call last)")
        assert not found, f"the proxy's log: {before[-300:]}{found}{after[:8000]}"

    async def postgres(self, order: str) -> None:
        """`stop` (at once, as a crash) or `start`."""
        await asyncio.to_thread(getattr(self.bench.postgres, order))
        if order == "start":
            self.back()

    async def redis(self, order: str) -> None:
        await asyncio.to_thread(getattr(self.bench.redis, order))
        if order == "start":
            self.back()

    async def restart(self) -> None:
        """The proxy comes back, in order or not."""
        self.back()
        assert await self.proxy.start(), self.proxy.tail()


@asynccontextmanager
async def a_world(bench: Bench, store: str, seed: str, size: int, stage: Stage | None = None) -> AsyncIterator[World]:
    """A world on `sqlite`, `postgres` or `redis` (a stream before Postgres) with its proxy up."""
    stage = stage or Stage()
    folder = stage.folder or Path(tempfile.mkdtemp(dir=bench.folder))
    forker, engine = await asyncio.to_thread(lambda: (bench.part(Forker), bench.part(EngineProcess)))
    url = stage.url or (f"sqlite:///{folder}/data/rolltap.db" if store == "sqlite" else await bench.database())
    settings = {"url": url, **stage.store}
    if store == "redis":
        settings["ingest"] = (await asyncio.to_thread(lambda: bench.redis)).url
        async with Redis.from_url(settings["ingest"]) as client:
            await client.flushall()
    proxy = Proxy(folder, forker, stage.engine_url or engine.url, settings)
    async with aiohttp.ClientSession() as http:
        world = World(bench, store, url, proxy, Clients(proxy, http), random.Random(seed), size, http, stage.relay)
        await world.begin_journal()
        assert await proxy.start(), proxy.tail()
        try:
            yield world
        finally:
            await proxy.kill()
            shutil.rmtree(folder, ignore_errors=True)
