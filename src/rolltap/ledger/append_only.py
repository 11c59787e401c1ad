"""Database triggers that refuse UPDATE, DELETE and TRUNCATE on append-only tables.

Somebody who may alter tables can drop a trigger. For that case rewards are chained (`rolltap.ledger.reward_chain`).
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import event


def append_only(table: sa.Table) -> None:
    """Creates the triggers together with the table."""
    for dialect in ("sqlite", "postgresql"):
        for statement in guards(table.name, dialect):
            event.listen(table, "after_create", sa.DDL(statement.replace("%", "%%")).execute_if(dialect=dialect))


def guards(table: str, dialect: str) -> list[str]:
    """The statements that create the triggers of a table."""
    if dialect == "sqlite":
        refuse = f"BEGIN SELECT RAISE(ABORT, '{table} are append-only'); END"
        return [
            f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse}",
            f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {refuse}",
        ]
    return [
        f"CREATE OR REPLACE FUNCTION {table}_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{table} are append-only'; END $$",
        f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION {table}_append_only()",
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_append_only()",
    ]
