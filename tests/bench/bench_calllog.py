"""The call log's speed and size: `python -m tests.bench.bench_calllog`. Writes reports/bench_calllog.json.

Calls a second and the time that a call waits for its two rows (intent and completion), for each store; the share of a
proxy's throughput that durability takes behind an engine of 50 ms; the size of a long session against its JSON; and a
restart on many recorded calls. Postgres and Redis are private servers on this machine's disk, with fsync.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from rolltap import __version__
from rolltap.calllog.facts import CallLog
from rolltap.calllog.sql import open_call_log
from rolltap.ids import new_id
from rolltap.types import Session

from ..conftest import PostgresServer, RedisServer
from ..memory_log import MemoryCallLog
from .recorded_calls import LongSession, Sample

REPORT = Path("reports") / "bench_calllog.json"
ENGINE_S = 0.05
GOALS = {
    "calls_per_s_sqlite": 5000,
    "tax_percent": 10,
    "times_smaller": 20,
    "restart_s": 3.0,
    "lookup_ms": 2.0,
}


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[CallLog]:
    log = MemoryCallLog() if url == "memory:" else open_call_log(url, **options)
    await log.start()
    try:
        yield log
    finally:
        await log.close()


Stores = dict[str, Callable[[], Any]]


async def calls_per_second(log: CallLog, sample: Sample, clients: int, calls: int, engine_s: float) -> dict[str, float]:
    """Clients that write a call's rows one after the other, with the engine's time between them."""
    session = await a_session(log)
    left = iter(range(calls))
    waits: list[float] = []

    async def client() -> None:
        for index in left:
            start = time.perf_counter()
            intent = sample.intent(session, index)
            await log.append_intent(intent)
            waited = time.perf_counter() - start
            if engine_s:
                await asyncio.sleep(engine_s)
            start = time.perf_counter()
            await log.append_completion(sample.completion(intent.id, index))
            waits.append(waited + time.perf_counter() - start)

    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    waits.sort()
    return {
        "clients": clients,
        "calls_per_s": calls / seconds,
        "p50_ms": 1e3 * waits[len(waits) // 2],
        "p99_ms": 1e3 * waits[int(len(waits) * 0.99)],
        "cpu_us_per_call": 1e6 * cpu / calls,
    }


async def a_session(log: CallLog) -> str:
    session = Session(new_id(), "policy", new_id(), time.time(), time.time() + 86_400)
    await log.open_session(session)
    return session.id


async def speed(stores: Stores, sample: Sample, scale: float) -> list[dict[str, Any]]:
    """Each store alone, at several numbers of clients."""
    lines = []
    for name, store in stores.items():
        for clients in (1, 32, 64, 128):
            async with store() as log:
                calls = int(scale * (500 if clients == 1 else 10_000))
                lines.append({"store": name, **await calls_per_second(log, sample, clients, calls, 0.0)})
    return lines


async def tax(stores: Stores, sample: Sample, scale: float) -> list[dict[str, Any]]:
    """The share of throughput that each store takes at 32 clients behind an engine of 50 ms."""
    calls = int(scale * 3000)

    async def rate(store: Callable[[], Any]) -> dict[str, float]:
        async with store() as log:
            return await calls_per_second(log, sample, 32, calls, ENGINE_S)

    free = (await rate(lambda: opened("memory:")))["calls_per_s"]
    lines = []
    for name, store in stores.items():
        figures = await rate(store)
        lines.append({"store": name, **figures, "tax_percent": 100 * (1 - figures["calls_per_s"] / free)})
    return lines


async def size(folder: Path, seed: int) -> dict[str, Any]:
    """A session of 50 turns that grows to 32k tokens, with tools and a system text, in SQLite and as JSON."""
    path, turns = folder / "size.db", 50
    log = open_call_log(f"sqlite:///{path}")
    await log.start()
    session = await a_session(log)
    long_session = LongSession(log, session, seed)
    for _ in range(turns):
        await long_session.add_turn()
    rows = await log.rows(session)
    assert rows[-1].prompt_ids.tolist() + rows[-1].call().output_ids.tolist() == long_session.context.tolist()
    await log.close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("VACUUM")
    database.close()
    stored = path.stat().st_size
    empty = 4096 * 16
    return {
        "turns": turns,
        "tokens": len(long_session.context),
        "json_bytes": long_session.json_bytes,
        "stored_bytes": stored,
        "times_smaller": long_session.json_bytes / stored,
        "stored_bytes_without_empty_pages": stored - empty,
    }


FILL = """
import asyncio, os, signal, sys
import numpy as np
from tests.bench.bench_calllog import fill
asyncio.run(fill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def fill(url: str, calls: int, seed: int) -> None:
    """Records many small calls in sessions of 100, and leaves 50 of them open."""
    sample = Sample.draw(np.random.default_rng(seed), 96, 32)
    log = open_call_log(url)
    await log.start()
    sessions: list[str] = []
    for start in range(0, calls, 1000):
        sessions = [await a_session(log) for _ in range(10)]
        intents = [sample.intent(sessions[index % 10], index) for index in range(min(1000, calls - start))]
        await asyncio.gather(*map(log.append_intent, intents))
        ended = [sample.completion(intent.id, index) for index, intent in enumerate(intents)]
        await asyncio.gather(*map(log.append_completion, ended))
    for index in range(50):
        await log.append_intent(sample.intent(sessions[0], index))


async def restart(url: str, calls: int, seed: int, console: Console) -> dict[str, Any]:
    """Records calls in a process that is killed; then: open, close its open calls, look a session up by its key."""
    with console.status(f"recording {calls:,} calls"):
        started = time.perf_counter()
        filler = [sys.executable, "-c", FILL, url, str(calls), str(seed)]
        done = await asyncio.to_thread(subprocess.run, filler, check=False)
        assert done.returncode == -signal.SIGKILL, f"the filling process ended with {done.returncode}"
        filled = time.perf_counter() - started
    start = time.perf_counter()
    log = open_call_log(url)
    await log.start()
    aborted = await log.abort_orphans([], at=time.time())
    first = (await log.sessions(limit=1))[0]
    await log.session_by_key(first.key_hash)
    ready = time.perf_counter() - start
    keys = [session.key_hash async for session in log.all_sessions()]
    random.Random(seed).shuffle(keys)
    times = []
    for key in keys[:2000]:
        start = time.perf_counter()
        await log.session_by_key(key)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    rows = await log.rows(first.id)
    loaded = time.perf_counter() - start
    await log.close()
    times.sort()
    return {
        "calls": calls,
        "sessions": len(keys),
        "recorded_calls_per_s": calls / filled,
        "restart_s": ready,
        "aborted": aborted,
        "lookup_p50_ms": 1e3 * times[len(times) // 2],
        "lookup_p99_ms": 1e3 * times[int(len(times) * 0.99)],
        "load_session_ms": 1e3 * loaded,
        "session_calls": len(rows),
    }


async def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    sample = Sample.draw(np.random.default_rng(arguments.seed), 700, 300)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        figures: dict[str, Any] = {"size": await size(folder, arguments.seed)}
        if arguments.restart:
            figures["restart"] = await restart(
                f"sqlite:///{folder}/many.db", arguments.restart, arguments.seed, console
            )
        if arguments.scale:
            postgres, redis = PostgresServer(), RedisServer()
            postgres.start()
            redis.start()
            numbers = iter(range(1000))
            stores: Stores = {
                "memory": lambda: opened("memory:"),
                "sqlite": lambda: opened(f"sqlite:///{folder}/{next(numbers)}.db"),
                "postgres": lambda: opened(postgres.url()),
                "redis + postgres": lambda: opened(postgres.url(), ingest=redis.url),
            }
            try:
                figures["speed"] = await speed(stores, sample, arguments.scale)
                figures["tax"] = await tax(stores, sample, arguments.scale)
            finally:
                redis.remove()
                postgres.remove()
    return figures


def show(figures: dict[str, Any], console: Console) -> None:
    for title in ("speed", "tax"):
        lines = figures.get(title, [])
        table = Table(*(lines[0] if lines else ()), title=f"call log: {title}")
        for line in lines:
            table.add_row(*(value if isinstance(value, str) else f"{value:,.2f}" for value in line.values()))
        if lines:
            console.print(table)
    for title in ("size", "restart"):
        table = Table("what", title, title=f"call log: {title}")
        for name, value in figures.get(title, {}).items():
            table.add_row(name.replace("_", " "), f"{value:,.2f}")
        if title in figures:
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the speed runs; 0 leaves them out")
    parser.add_argument("--restart", type=int, default=1_000_000, help="calls recorded before the restart; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default the system's")
    arguments = parser.parse_args()
    console = Console()
    started, load = time.time(), os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the servers are stopped, too
    figures = uvloop.run(run(arguments, console))
    show(figures, console)
    report = {
        "rolltap": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "cores": os.cpu_count(),
        "load_average_before": load,
        "seed": arguments.seed,
        "time": started,
        "seconds": time.time() - started,
        "goals": GOALS,
        **figures,
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2), encoding="utf-8")
    console.print(f"report {REPORT}")


if __name__ == "__main__":
    main()
