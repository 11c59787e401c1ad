"""The first tables. New databases are made as declared; this is what later steps start from.

The files beside it hold the statements, frozen: a change of the tables is a step of its own.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0100"
down_revision = None


def upgrade() -> None:
    connection = op.get_bind()
    statements = Path(__file__).with_suffix(f".{connection.dialect.name}.sql").read_text(encoding="utf-8")
    for statement in statements.split(";\n"):
        if statement:
            connection.exec_driver_sql(statement)
