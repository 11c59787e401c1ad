"""Inserts many rows in one statement, whether or not some are there already.

SQLite: a prepared insert, run for each row. Postgres: one insert from arrays, one a column, which takes one round
trip however many rows there are.

`Insert.run` is for a transaction with more in it. A door runs several inserts as a transaction of their own, past
SQLAlchemy (`Database.insert`).
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
"""Which rows give way to one of the same key: a presumed end to the true one, a miss to the retry that arrived."""


class Insert:
    """Inserts into a table; what there is of the same key stays as it is, or is replaced where `replace` holds.

    `replace` is a condition in SQL on the row that is there; by default that of `REPLACED`.
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
        """Postgres's statement; its parameters are the columns, and begin with number `first`."""
        arrays = ", ".join(f"${index}::{kind}[]" for index, kind in enumerate(self._types, first))
        return f"{self._head} SELECT * FROM unnest({arrays}) {self._tail}"

    def run(self, connection: sa.Connection, rows: Sequence[Row]) -> int:
        """Inserts the rows; returns how many were new or took the place of another."""
        if self._arrays:
            return connection.exec_driver_sql(self.sql, tuple(columns(rows))).rowcount
        return connection.exec_driver_sql(self.sql, list(rows)).rowcount


def columns(rows: Sequence[Row]) -> list[list[Any]]:
    """The rows by column, as Postgres's statement takes them."""
    return [list(column) for column in zip(*rows, strict=True)]


@lru_cache(maxsize=256)
def together(inserts: tuple[Insert, ...]) -> str:
    """Postgres's inserts as one statement, which is its own transaction; its parameters are all their columns.

    It returns one row: what `Insert.run` returns, for each of them.
    """
    first, parts = 1, []
    for index, insert in enumerate(inserts):
        parts.append(f"in_{index} AS ({insert.from_arrays(first)} RETURNING 1)")
        first += insert.width
    counts = ", ".join(f"(SELECT count(*) FROM in_{index})" for index in range(len(inserts)))
    return f"WITH {', '.join(parts)} SELECT {counts}"
