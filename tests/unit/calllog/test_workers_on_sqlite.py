"""Workers of one server that write to one SQLite file in turn."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from rolltap.calllog.backend import Durability, Insert
from rolltap.calllog.database import Database
from rolltap.calllog.sql import open_call_log
from rolltap.calllog.sqlite import reserved
from rolltap.errors import DatabaseInUse, StoreUnavailable

from .facts import a_session, append

METADATA = sa.MetaData()
COUNTER = sa.Table("counter", METADATA, sa.Column("n", sa.Integer))
ROWS = sa.Table("written", METADATA, sa.Column("id", sa.Text, primary_key=True))

WRITER = """
import asyncio, sys
from tests.unit.calllog.test_workers_on_sqlite import write
asyncio.run(write(sys.argv[1], int(sys.argv[2])))
"""


async def write(url: str, seed: int) -> None:
    """Adds to the counter in each of the ways to write, and says so of each that has ended, until it is killed."""
    chosen = random.Random(seed)
    database = Database(url, shared=True)
    await database.start(METADATA)
    print("begun", flush=True)

    def add(connection: sa.Connection) -> None:
        (n,) = connection.execute(sa.select(COUNTER.c.n)).one()
        time.sleep(0.002 * chosen.random())
        connection.execute(sa.update(COUNTER).values(n=n + 1))

    for number in range(10**6):
        durability = chosen.choice(list(Durability))
        way = chosen.choice(("transact", "write", "insert", "fails", "is cancelled"))
        if way == "transact":
            await database.transact(add, durability)
        elif way == "write":
            async with database.write(durability) as connection:
                n = await connection.scalar(sa.select(COUNTER.c.n))
                await asyncio.sleep(0.002 * chosen.random())
                await connection.execute(sa.update(COUNTER).values(n=n + 1))
        elif way == "insert":
            row = f"{seed}-{number}"
            await database.insert({Insert(ROWS, database.dialect): [(row,)]}, durability)
            print(row, flush=True)
        elif way == "fails":
            with pytest.raises(ZeroDivisionError):
                await database.transact(lambda connection: (add(connection), 1 / 0), durability)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.001), database.write(durability) as connection:
                    await connection.run(add)
                    await asyncio.Event().wait()
        if way in ("transact", "write"):
            print("added", flush=True)


def test_whoever_is_killed_nothing_acknowledged_is_lost_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    url = f"sqlite:///{path}"
    chosen = random.Random()
    printed: list[str] = []
    with reserved(path):
        asyncio.run(made(url))
        for turn in range(2):
            writers = [(tmp_path / f"{turn}{number}", f"{turn}{number}") for number in range(3)]
            running = {out: start_writer(url, seed, out) for out, seed in writers}
            for out in running:
                while not out.read_text().endswith("\n"):
                    time.sleep(0.05)
            for out, writer in sorted(running.items(), key=lambda _: chosen.random()):
                time.sleep(0.5 * chosen.random())
                assert writer.poll() is None, "its own write failed"
                writer.kill()
                writer.wait()
                printed += out.read_text().splitlines()
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database, database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = {row for (row,) in database.execute("SELECT id FROM written")}
        ((n,),) = database.execute("SELECT n FROM counter").fetchall()
    acknowledged = [line for line in printed if "-" in line]
    added = printed.count("added")
    assert rows >= set(acknowledged)
    assert len(rows) <= len(acknowledged) + 6, "each of six may have died before it said so"
    assert added <= n <= added + 6


def start_writer(url: str, seed: str, out: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        return subprocess.Popen([sys.executable, "-c", WRITER, url, seed], stdout=file)


async def made(url: str) -> None:
    database = Database(url, shared=True)
    await database.start(METADATA)
    await database.transact(lambda connection: connection.execute(sa.insert(COUNTER).values(n=0)))
    await database.close()


def test_others_are_refused_as_long_as_a_fork_lives(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with reserved(path):
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(ready, 1)
            os._exit(0)
    try:
        with pytest.raises(DatabaseInUse, match=f"in process {os.getpid()}"), reserved(path):
            pass
    finally:
        os.write(go, b"x")
        os.waitpid(child, 0)
    with reserved(path):
        pass


async def test_a_worker_that_was_stopped_in_its_turn_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls go to the spool until it goes on; what needs the store itself is refused."""
    monkeypatch.setattr("rolltap.calllog.sqlite.BUSY_TIMEOUT_S", 0.2)
    log = open_call_log(f"sqlite:///{tmp_path}/a.db", spools=(tmp_path / "spool",), shared=True)
    await log.start()
    session = a_session()
    await log.open_session(session)
    with (tmp_path / "a.db.turn").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        intent = await append(log, session)
        assert (await log.condition()).spool is True
        assert log.waiting
        with pytest.raises(StoreUnavailable, match=r"another worker has not ended its transaction for 0\.2 s"):
            await log.database.transact(lambda connection: None)
        with pytest.raises(StoreUnavailable, match="another worker"):
            async with log.database.write():
                pass
    async with asyncio.timeout(20):
        await log.settled()
    (row,) = await log.rows(session.id)
    assert row.intent.id == intent.id
    await log.close()
