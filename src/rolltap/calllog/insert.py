"""Inserts many rows in one statement; existing rows are kept or replaced.

SQLite runs a prepared insert for each row. Postgres runs one insert from arrays, one per column, so any number of rows
takes one round trip.

`Insert.run` works inside a larger transaction. `Database.insert` runs several inserts as their own transaction and
bypasses SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

Row = tuple[Any, ...]

REPLACED = {
    "call_completions": "call_completions.presumed AND NOT excluded.presumed",
    "deliveries": "excluded.delivered AND NOT deliveries.delivered",
}
"""When a new row replaces one with the same key: a true completion replaces a presumed one, and a delivered reply
replaces an undelivered one."""


class Insert:
    """Inserts into a table. A row with an existing key is ignored, or replaces the old row if `replace` is true.

    `replace` is an SQL condition on the old row and on `excluded`, the new one; the default is in `REPLACED`.
    """

    def __init__(self, table: sa.Table, dialect: sa.Dialect, *, replace: str | None = None) -> None:
        self._arrays = dialect.name == "postgresql"
        names = ", ".join(column.name for column in table.columns)
        key = ", ".join(column.name for column in table.primary_key)
        clash = f"({key}) DO NOTHING"
        replace = replace or REPLACED.get(table.name)
        if replace is not None:
            values = ", ".join(f"{column.name} = excluded.{column.name}" for column in table.columns)
            clash = f"({key}) DO UPDATE SET {values} WHERE {replace}"
        self._types = [column.type.compile(dialect) for column in table.columns]
        self._head = f"INSERT INTO {table.name} ({names})"
        self._tail = f"ON CONFLICT {clash}"
        marks = ", ".join("?" for _ in table.columns)
        self.sql = self.from_arrays(1) if self._arrays else f"{self._head} VALUES ({marks}) {self._tail}"

    @property
    def width(self) -> int:
        return len(self._types)

    def from_arrays(self, first: int) -> str:
        """The Postgres statement. Its parameters are the columns; the first one has number `first`."""
        arrays = ", ".join(f"${index}::{kind}[]" for index, kind in enumerate(self._types, first))
        return f"{self._head} SELECT * FROM unnest({arrays}) {self._tail}"

    def run(self, connection: sa.Connection, rows: Sequence[Row]) -> int:
        """Inserts the rows; returns how many were new or replaced another."""
        if self._arrays:
            return connection.exec_driver_sql(self.sql, tuple(columns(rows))).rowcount
        return connection.exec_driver_sql(self.sql, list(rows)).rowcount


def columns(rows: Sequence[Row]) -> list[list[Any]]:
    """Transposes rows to columns, the form for the Postgres statement."""
    return [list(column) for column in zip(*rows, strict=True)]


@lru_cache(maxsize=256)
def together(inserts: tuple[Insert, ...]) -> str:
    """Several Postgres inserts as one statement and one transaction. Its parameters are the columns of all of them.

    It returns one row, with the result of `Insert.run` for each of them.
    """
    first, parts = 1, []
    for index, insert in enumerate(inserts):
        parts.append(f"in_{index} AS ({insert.from_arrays(first)} RETURNING 1)")
        first += insert.width
    counts = ", ".join(f"(SELECT count(*) FROM in_{index})" for index in range(len(inserts)))
    return f"WITH {', '.join(parts)} SELECT {counts}"
