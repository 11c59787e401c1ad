"""A long reader makes SQLite's log grow; afterwards it is cut back."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa

from rolltap.calllog import sqlite
from rolltap.calllog.database import Database


async def test_the_log_is_cut_back_after_a_long_reader(tmp_path: Path) -> None:
    store, limit = tmp_path / "it.db", sqlite.WAL_BYTES

    def add(connection: sa.Connection) -> None:
        connection.exec_driver_sql("INSERT INTO blobs VALUES (zeroblob(1000000))")

    database = Database(f"sqlite:///{store}")
    await database.start()
    await database.transact(lambda connection: connection.exec_driver_sql("CREATE TABLE blobs (body BLOB)"))
    reader = sqlite3.connect(store, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM blobs").fetchone()
    for _ in range(limit // 1_000_000 + 6):
        await database.transact(add)
    assert log_size(store) > limit
    reader.close()
    for _ in range(3):
        await database.transact(add)
    assert log_size(store) <= limit
    await database.close()


def log_size(store: Path) -> int:
    return store.with_name(f"{store.name}-wal").stat().st_size
