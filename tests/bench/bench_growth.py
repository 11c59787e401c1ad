"""What grows with the record: `python -m tests.bench.bench_growth --calls 1000000 --queued 1000000`. Writes
reports/bench_growth.json.

A record of `--calls` calls (2 a session, 8 sessions a group, all trained but the last groups) and `--queued` tasks, on
SQLite and on a private Postgres. Its rows are written past the server. Then `rolltap serve` starts on it, twice, and is
used as its clients do: a list, a search, leases, claims; then `log stats` and `log prune --dry-run`.
Times are medians, and the worst of several where there are two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from rich.console import Console
from rich.table import Table

from rolltap import __version__
from rolltap.calllog.database import Database
from rolltap.calllog.sql import open_call_log
from rolltap.contract.admin import GroupRule
from rolltap.contract.trainer import LeaseOptions
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import AdminClient
from rolltap.ledger.rows import rule_json
from rolltap.ledger.schema import groups, submissions, submitted
from rolltap.trainer_client.lease.client import TrainerClient

from ..conftest import PostgresServer, free_port
from ..faults.processes import children_of
from .bench_viewer import BEGAN, CALLS, GROUP, POLICY, Rows, group_id, write_record

REPORT = Path("reports") / "bench_growth.json"
KEYS = {"admin": "admin-key", "trainer": "trainer-key"}
READY = 64
"""Groups that are not trained yet."""

SUBMISSIONS, OPENED = 10, 1000
"""Those with queued tasks, and tasks of each of as many before them."""

LEASE, CLAIM = 8, 8
"""Groups of a lease, rollouts of a claim."""

RULE = json.dumps(rule_json(GroupRule()))
LOOKS = 20
QUEUED_AT_ONCE = 50_000
UP_WITHIN_S = 600.0
Figures = dict[str, float]


async def fill(url: str, calls: int, queued: int) -> None:
    log = open_call_log(url)
    await log.start()
    await write_record(log, calls // CALLS)
    count = calls // CALLS // GROUP
    last = [group_id(number) for number in range(max(0, count - READY), count)]
    ready = sa.update(groups).where(groups.c.id.in_(last)).values(status="complete", acked_step=None)
    await log.database.transact(lambda connection: connection.execute(ready))
    await queue(log.database, queued)
    if log.database.dialect_name == "postgresql":
        async with log.database.write() as connection:
            await connection.execute(sa.text("ANALYZE"))
    await log.close()


async def queue(database: Database, queued: int) -> None:
    """`queued` tasks in submissions of several priorities, behind as many submissions without any."""
    rows = Rows()
    for number in range(2 * SUBMISSIONS):
        rows.add(
            submissions, id=f"submission-{number:04d}", digest=f"s{number}", policy=POLICY, n=GROUP,
            priority=number % 3, tags="[]", rule=RULE, created_at=BEGAN + number,
        )  # fmt: skip
    await rows.write(database)
    for number in range(2 * SUBMISSIONS):
        ended = number < SUBMISSIONS
        count = OPENED if ended else max(1, queued // SUBMISSIONS)
        for start in range(0, count, QUEUED_AT_ONCE):
            rows = Rows()
            for position in range(start, min(start + QUEUED_AT_ONCE, count)):
                group = group_id(0) if ended else None
                rows.add(submitted, f"submission-{number:04d}", position, f"digest-{position % 500}", group)
            await rows.write(database)


@contextmanager
def server(folder: Path, url: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str], float]]:
    """A running `rolltap serve`, the addresses of its planes, and the seconds until it was ready."""
    ports = {plane: free_port() for plane in ("agent", "trainer", "admin")}
    config = folder / "rolltap.toml"
    lines = "".join(f"{plane}_port = {port}\n" for plane, port in ports.items())
    config.write_text(
        f'data = "{folder}"\n[listen]\n{lines}[store]\nurl = "{url}"\n'
        f'[keys]\nadmin = "{KEYS["admin"]}"\ntrainer = "{KEYS["trainer"]}"\n[engines.none]\nurl = "http://127.0.0.1:9"\n'
        f'[policies.{POLICY}]\nengine = "none"\ntokenizer = "{FOLDER}"\nfamily = "qwen3"\n'
    )
    urls = {plane: f"http://127.0.0.1:{port}" for plane, port in ports.items()}
    began = time.perf_counter()
    command = [sys.executable, "-m", "rolltap", "serve", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "log").open("ab"))
    try:
        while not _answers(urls["admin"]):
            if process.poll() is not None or time.perf_counter() > began + UP_WITHIN_S:
                raise SystemExit(f"the server did not start: {(folder / 'log').read_text()}")
            time.sleep(0.05)
        yield process, urls, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def timed(looks: int, look: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(looks):
        began = time.perf_counter()
        look()
        seconds.append(time.perf_counter() - began)
    return seconds


def get(urls: dict[str, str], path: str) -> bytes:
    request = urllib.request.Request(urls["admin"] + path, headers={"Authorization": f"Bearer {KEYS['admin']}"})
    with urllib.request.urlopen(request, timeout=UP_WITHIN_S) as reply:
        return reply.read()


def memory_mb(process: subprocess.Popen[bytes]) -> Figures:
    """Resident memory of the proxy, and of the process that reads."""
    own, *others = [_resident_mb(pid) for pid in (process.pid, *children_of(process.pid))]
    return {"proxy_mb": own, "reading_mb": sum(others)}


def _resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS")), 0.0)


def use(urls: dict[str, str]) -> Figures:
    """Seconds of what clients ask for."""
    figures: Figures = {}
    pages = {
        "list": "/read/sessions?limit=50",
        "search": "/read/sessions?limit=50&search=question",
        "policy": f"/policies/{POLICY}",
        "metrics": "/metrics",
    }
    for name, path in pages.items():
        first, *later = timed(1 + LOOKS // 2, lambda path=path: get(urls, path))
        figures |= {f"{name}_first_s": first, f"{name}_s": statistics.median(later)}
    seconds = asyncio.run(claims(urls["admin"]))  # before any trainer is there, whose room would bound them
    figures |= {"claim_s": statistics.median(seconds), "claim_worst_s": max(seconds)}
    trainer = TrainerClient(urls["trainer"], KEYS["trainer"], "bench")
    leases: list[Any] = []
    options = LeaseOptions(wait=30)
    seconds = timed(READY // LEASE, lambda: leases.append(trainer.lease(POLICY, groups=LEASE, options=options)))
    assert all(len(lease.groups) == LEASE for lease in leases), "fewer groups were ready"
    return figures | {"lease_s": statistics.median(seconds), "lease_worst_s": max(seconds)}


async def claims(url: str) -> list[float]:
    """Seconds of claims of `CLAIM` rollouts, each of a group that is opened for it."""
    seconds = []
    async with AdminClient(url, KEYS["admin"]) as client:
        for number in range(LOOKS):
            began = time.perf_counter()
            claimed = await client.claim_rollouts(f"node-{number}", CLAIM, ttl=600, wait=30)
            seconds.append(time.perf_counter() - began)
            assert len(claimed) == CLAIM
    return seconds


def commands(url: str) -> Figures:
    """Seconds of commands on the record, which has no server any more."""
    figures: Figures = {}
    for name, *words in (("stats",), ("prune", "--older-than", "1m", "--dry-run")):
        command = [sys.executable, "-m", "rolltap", "log", name, *words, "--store", url]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        figures[f"{name}_s"] = time.perf_counter() - began
    return figures


def measure(folder: Path, url: str, calls: int, queued: int) -> Figures:
    began = time.perf_counter()
    asyncio.run(fill(url, calls, queued))
    figures: Figures = {"calls": calls, "queued": queued, "fill_s": time.perf_counter() - began}
    with server(folder, url) as (_, _, seconds):
        figures["start_s"] = seconds
    with server(folder, url) as (process, urls, seconds):
        figures["restart_s"] = seconds
        figures |= use(urls)
        figures |= memory_mb(process)
    return figures | commands(url) | disk_mb(folder, url)


def disk_mb(folder: Path, url: str) -> Figures:
    index = sum(path.stat().st_size for path in folder.glob("*.index*"))
    if url.startswith("sqlite"):
        size = sum(path.stat().st_size for path in folder.glob("store.db*") if "index" not in path.name)
    else:
        size = asyncio.run(_size(url))
    return {"store_mb": size / 1e6, "index_mb": index / 1e6}


async def _size(url: str) -> int:
    database = Database(url, writable=False)
    await database.start()
    try:
        ((size,),) = await database.select(sa.select(sa.func.pg_database_size(sa.func.current_database())))
        return size
    finally:
        await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--queued", type=int, default=1_000_000, help="tasks")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default the system's")
    options = parser.parse_args()
    lines: dict[str, Figures] = {}
    load = os.getloadavg()[0]
    for store in options.stores:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            if store == "sqlite":
                lines[store] = measure(Path(name), f"sqlite:///{name}/store.db", options.calls, options.queued)
                continue
            postgres = PostgresServer()
            postgres.start()
            try:
                lines[store] = measure(Path(name), postgres.url(), options.calls, options.queued)
            finally:
                postgres.remove()
    table = Table("", *lines, title=f"{options.calls:,} calls, {options.queued:,} tasks queued")
    for name in next(iter(lines.values())):
        table.add_row(name, *(f"{line[name]:,.3f}" for line in lines.values()))
    Console().print(table)
    about = {
        "rolltap": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "cores": os.cpu_count(),
        "load_average_before": load,
        "time": time.time(),
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps({"stores": lines, **about}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
