"""Database triggers that keep a table's rows unchanged until their session is pruned."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import event


def append_only_until_pruned(table: sa.Table) -> None:
    """Creates the triggers together with the table, which needs a column `session_id`."""
    for dialect in ("sqlite", "postgresql"):
        for statement in guards_until_pruned(table.name, dialect):
            event.listen(table, "after_create", sa.DDL(statement.replace("%", "%%")).execute_if(dialect=dialect))


def guards_until_pruned(table: str, dialect: str) -> list[str]:
    """The statements that create the triggers of a table."""
    pruned = "EXISTS (SELECT 1 FROM prunings p WHERE p.session_id = OLD.session_id)"
    if dialect == "sqlite":
        refuse = f"BEGIN SELECT RAISE(ABORT, '{table} are append-only'); END"
        return [
            f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse}",
            f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} WHEN NOT {pruned} {refuse}",
        ]
    return [
        f"CREATE OR REPLACE FUNCTION {table}_until_pruned() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF TG_OP = 'DELETE' THEN IF {pruned} THEN RETURN OLD; END IF; END IF; "
        f"RAISE EXCEPTION '{table} are append-only'; END $$",
        f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION {table}_until_pruned()",
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_until_pruned()",
    ]
