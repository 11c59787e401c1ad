"""The door to a database: transactions, snapshots, cancellation, errors, and SQLite's one writer."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from rolltap.calllog.backend import Connection, Durability, Insert
from rolltap.calllog.database import Database
from rolltap.errors import ConfigError, RecordCorrupt, StoreError, StoreUnavailable

metadata = sa.MetaData()
things = sa.Table(
    "things", metadata, sa.Column("id", sa.Text, primary_key=True), sa.Column("size", sa.Integer, nullable=False)
)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path}/it.db"


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    database = Database(url)
    await database.start(metadata)
    yield database
    await database.close()


async def sizes(database: Database) -> dict[str, int]:
    async with database.read() as connection:
        return {row.id: row.size for row in await connection.execute(sa.select(things))}


async def put(database: Database, name: str, size: int) -> None:
    async with database.write() as connection:
        await connection.execute(sa.insert(things).values(id=name, size=size))


async def test_a_transaction_is_seen_whole_or_not_at_all(database: Database):
    async with database.write() as connection:
        await connection.execute(sa.insert(things), [{"id": "a", "size": 1}, {"id": "b", "size": 2}])
        assert await connection.scalar(sa.select(sa.func.sum(things.c.size))) == 3
        assert await sizes(database) == {}
    assert await sizes(database) == {"a": 1, "b": 2}

    async def fail() -> None:
        async with database.write() as connection:
            updated = await connection.execute(sa.update(things).values(size=9))
            assert updated.rowcount == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await sizes(database) == {"a": 1, "b": 2}


async def test_work_is_one_transaction_or_one_snapshot(database: Database):
    def work(connection: sa.Connection) -> int:
        connection.execute(sa.insert(things).values(id="a", size=1))
        return 7

    def failing(connection: sa.Connection) -> None:
        connection.execute(sa.delete(things))
        raise ZeroDivisionError

    assert await database.transact(work, Durability.PROCESS) == 7
    with pytest.raises(ZeroDivisionError):
        await database.transact(failing)
    count = sa.select(sa.func.count()).select_from(things)
    assert await database.query(lambda connection: connection.scalar(count)) == 1


async def test_a_snapshot_does_not_move(database: Database):
    async with database.read() as connection:
        before = (await connection.execute(sa.select(things))).all()
        await put(database, "late", 1)
        assert (await connection.execute(sa.select(things))).all() == before == []
    assert await sizes(database) == {"late": 1}


async def test_reading_can_not_write(database: Database):
    with pytest.raises(StoreError):
        async with database.read() as connection:
            await connection.execute(sa.insert(things).values(id="a", size=1))
    assert await sizes(database) == {}


async def test_a_row_that_breaks_a_constraint_is_named_and_changes_nothing(database: Database):
    await put(database, "a", 1)

    async def put_two() -> None:
        async with database.write() as connection:
            await connection.execute(sa.insert(things).values(id="b", size=1))
            await connection.execute(sa.insert(things).values(id="a", size=1))

    with pytest.raises(RecordCorrupt, match="things"):
        await put_two()
    assert await sizes(database) == {"a": 1}


async def test_a_cancelled_transaction_is_rolled_back_and_the_next_one_works(database: Database):
    inside = asyncio.Event()

    async def hold() -> None:
        async with database.write() as connection:
            await connection.execute(sa.insert(things).values(id="held", size=1))
            inside.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await inside.wait()
    holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    await put(database, "next", 1)
    assert await sizes(database) == {"next": 1}


async def test_writers_at_once_lose_no_update(database: Database):
    await put(database, "counter", 0)

    async def count() -> None:
        async with database.write() as connection:
            await connection.execute(sa.update(things).values(size=things.c.size + 1))

    await asyncio.gather(*(count() for _ in range(20)))
    assert await sizes(database) == {"counter": 20}


async def test_the_databases_clock_is_told_in_seconds(database: Database):
    before = time.time()
    async with database.write() as connection:
        inside = await connection.now()
    assert before - 5 < inside <= await database.now() < before + 60


async def test_a_database_opened_for_reading_refuses_to_write(database: Database, url: str):
    await put(database, "a", 1)
    reader = Database(url, writable=False)
    await reader.start(metadata)
    assert await sizes(reader) == {"a": 1}
    with pytest.raises(ConfigError, match="read-only"):
        await put(reader, "b", 1)
    with pytest.raises(ConfigError, match="read-only"):
        await reader.transact(lambda connection: connection.execute(sa.delete(things)))
    await reader.close()


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("nonsense", ConfigError, "not a URL"),
        ("mysql://host/db", ConfigError, "known: sqlite, postgresql"),
        ("sqlite://", ConfigError, "needs a file"),
        ("sqlite:////proc/nowhere/it.db", StoreUnavailable, "/proc/nowhere"),
        ("postgresql://user:hidden@127.0.0.1:1/db", StoreUnavailable, r"\*\*\*@127.0.0.1:1/db can't be reached"),
    ],
)
async def test_a_url_that_can_not_be_used_is_answered_with_one_line(url: str, error: type[Exception], words: str):
    with pytest.raises(error, match=words) as raised:
        await Database(url).start()
    assert "\n" not in str(raised.value)
    assert "hidden" not in str(raised.value)


async def test_a_file_that_is_no_database_is_reported_and_left_alone(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database at all, but long enough to be read as a header\n" * 100)
    with pytest.raises(RecordCorrupt, match=r"notes\.txt"):
        await Database(f"sqlite:///{path}").start(metadata)
    assert path.read_text().startswith("not a database")


OPENS = """
import asyncio, sys
from rolltap.calllog.database import Database
from rolltap.errors import ConfigError

async def main():
    database = Database(sys.argv[1])
    try:
        await database.start()
    except ConfigError as error:
        print(error)
    else:
        await database.close()
        print("opened")

asyncio.run(main())
"""


async def open_elsewhere(url: str) -> str:
    """What another process says that opens the database for writing."""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", OPENS, url], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


async def test_sqlite_has_one_writing_process_at_a_time(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/it.db"
    database = Database(url)
    await database.start(metadata)
    assert "is open for writing in process" in await open_elsewhere(url)
    second = Database(url)
    with pytest.raises(ConfigError, match="open for writing"):
        await second.start()
    await put(database, "a", 1)
    await database.close()
    assert await open_elsewhere(url) == "opened"


async def test_sqlite_readers_can_not_checkpoint(tmp_path: Path):
    """What keeps the WAL-reset bug out: only the writer moves pages from the log into the database."""
    database = Database(f"sqlite:///{tmp_path}/it.db")
    await database.start(metadata)
    await put(database, "a", 1)
    before = (tmp_path / "it.db").read_bytes()
    with pytest.raises(StoreError):
        await database.query(lambda connection: connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)"))
    assert (tmp_path / "it.db").read_bytes() == before
    await database.close()
    assert not (tmp_path / "it.db-wal").exists()


async def test_sqlite_commits_are_synchronous_and_unmapped(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path}/it.db")
    await database.start()

    def pragmas(connection: sa.Connection) -> list[object]:
        names = ("journal_mode", "synchronous", "mmap_size", "foreign_keys")
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    assert await database.transact(pragmas) == ["wal", 2, 0, 1]
    assert await database.transact(pragmas, Durability.PROCESS) == ["wal", 1, 0, 1]
    await database.close()


async def test_sqlite_finishes_a_statement_whose_caller_is_cancelled(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path}/it.db")
    await database.start(metadata)
    started, release = threading.Event(), threading.Event()

    def slow(connection: sa.Connection) -> None:
        connection.execute(sa.insert(things).values(id="slow", size=1))
        started.set()
        release.wait(30)

    task = asyncio.create_task(database.transact(slow))
    await asyncio.to_thread(started.wait)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await sizes(database) == {"slow": 1}
    await database.close()


async def test_the_file_is_a_plain_sqlite_database(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path}/sub/it's 100%.db")
    await database.start(metadata)
    await put(database, "a", 1)
    await database.close()
    with closing(sqlite3.connect(tmp_path / "sub" / "it's 100%.db")) as connection, connection:
        assert connection.execute("select * from things").fetchall() == [("a", 1)]
    connection.close()


async def test_a_postgres_connection_lost_after_its_work_fails_nobody_and_leaves_the_pool_whole(postgres_url: str):
    """More losses than the pool has connections, after a read and in the middle of a transaction."""
    import asyncpg

    database = Database(postgres_url)
    await database.start(metadata)
    killer = await asyncpg.connect(postgres_url)

    async def lose(connection: Connection) -> None:
        mine = await connection.scalar(sa.select(sa.func.pg_backend_pid()))
        await killer.execute("SELECT pg_terminate_backend($1, 5000)", mine)

    async def lost_halfway() -> None:
        async with database.write() as connection:
            await lose(connection)
            await connection.execute(sa.insert(things).values(id="lost", size=1))

    for _ in range(20):
        async with database.read() as connection:
            await lose(connection)
        with pytest.raises(StoreUnavailable):
            await lost_halfway()
    await put(database, "kept", 1)
    assert await sizes(database) == {"kept": 1}
    await killer.close()
    await database.close()


@pytest.mark.parametrize("replaced", [False, True])
async def test_nothing_is_written_to_a_file_that_nobody_will_find(tmp_path: Path, replaced: bool):
    """SQLite goes on with a file that has no name any more, and acknowledges what is gone at the next start."""
    path = tmp_path / "it.db"
    database = Database(f"sqlite:///{path}")
    await database.start(metadata)
    await put(database, "a", 1)
    path.rename(tmp_path / "moved")
    if replaced:
        path.write_bytes(b"")
    rows = {Insert(things, database.dialect): [("c", 3)]}
    ways = (
        put(database, "b", 2),
        database.transact(lambda connection: connection.execute(sa.delete(things))),
        database.insert(rows, Durability.POWER),
    )
    for write in ways:
        with pytest.raises(StoreUnavailable, match="was removed or replaced while it is open: restart rolltap"):
            await write
    (tmp_path / "moved").rename(path)
    await put(database, "d", 4)
    assert await sizes(database) == {"a": 1, "d": 4}
    await database.close()
