"""Inserts many rows in one statement, whether or not some are there already.

SQLite: a prepared insert, run for each row. Postgres: one insert from arrays, one an column, which takes one round
trip however many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

Row = tuple[Any, ...]


class Insert:
    """Inserts into a table; what there is of the same key stays as it is, or is replaced where `replace` holds.

    `replace` is a condition in SQL on the row that is there.
    """

    def __init__(self, table: sa.Table, dialect: sa.Dialect, *, replace: str | None = None) -> None:
        self._arrays = dialect.name == "postgresql"
        names = ", ".join(column.name for column in table.columns)
        key = ", ".join(column.name for column in table.primary_key)
        clash = f"({key}) DO NOTHING"
        if replace is not None:
            values = ", ".join(f"{column.name} = excluded.{column.name}" for column in table.columns)
            clash = f"({key}) DO UPDATE SET {values} WHERE {replace}"
        if self._arrays:
            types = [column.type.compile(dialect) for column in table.columns]
            arrays = ", ".join(f"${index}::{kind}[]" for index, kind in enumerate(types, 1))
            source = f"SELECT * FROM unnest({arrays})"
        else:
            source = f"VALUES ({', '.join('?' for _ in table.columns)})"
        self._sql = f"INSERT INTO {table.name} ({names}) {source} ON CONFLICT {clash}"

    def run(self, connection: sa.Connection, rows: Sequence[Row]) -> int:
        """Inserts the rows; returns how many were new or took the place of another."""
        if self._arrays:
            columns = tuple(list(column) for column in zip(*rows, strict=True))
            return connection.exec_driver_sql(self._sql, columns).rowcount
        return connection.exec_driver_sql(self._sql, list(rows)).rowcount
