"""Database triggers that refuse UPDATE, DELETE and TRUNCATE on append-only tables.

Somebody who may alter tables can drop a trigger. For that case rewards are chained (`rolltap.ledger.reward_chain`).
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import event

_PRUNED = "EXISTS (SELECT 1 FROM prunings p WHERE p.session_id = OLD.session_id)"


def append_only(table: sa.Table, *, until_pruned: bool = False) -> None:
    """Creates the triggers together with the table.

    With `until_pruned` rows may be deleted once their session is pruned; the table needs a column `session_id`.
    """
    for dialect in ("sqlite", "postgresql"):
        for statement in guards(table.name, dialect, until_pruned=until_pruned):
            event.listen(table, "after_create", sa.DDL(statement.replace("%", "%%")).execute_if(dialect=dialect))


def guards(table: str, dialect: str, *, until_pruned: bool = False) -> list[str]:
    """The statements that create the triggers of a table."""
    if dialect == "sqlite":
        refuse = f"BEGIN SELECT RAISE(ABORT, '{table} are append-only'); END"
        unless_pruned = f"WHEN NOT {_PRUNED} " if until_pruned else ""
        return [
            f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse}",
            f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {unless_pruned}{refuse}",
        ]
    function = f"{table}_{'until_pruned' if until_pruned else 'append_only'}()"
    allow_pruned = f"IF TG_OP = 'DELETE' THEN IF {_PRUNED} THEN RETURN OLD; END IF; END IF; " if until_pruned else ""
    return [
        f"CREATE OR REPLACE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {allow_pruned}RAISE EXCEPTION '{table} are append-only'; END $$",
        f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}",
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {function}",
    ]
