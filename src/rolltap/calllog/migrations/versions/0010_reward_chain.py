"""Rewards are append-only by triggers and chained by hashes, and an audit log says which key did what."""

from __future__ import annotations

import hashlib
import json
from itertools import groupby

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

FIELDS = ("id", "rollout_id", "attempt", "value", "scope", "source", "detail", "created_at", "key_id", "number")


def upgrade() -> None:
    connection = op.get_bind()
    if not sa.inspect(connection).has_table("rewards"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.execute("ALTER TABLE rewards ADD COLUMN key_id VARCHAR NOT NULL DEFAULT ''")
    op.execute("ALTER TABLE rewards ADD COLUMN number INTEGER NOT NULL DEFAULT 0")
    op.execute("ALTER TABLE rewards ADD COLUMN hash VARCHAR NOT NULL DEFAULT ''")
    op.execute("ALTER TABLE rollouts ADD COLUMN reward_head VARCHAR")
    _chain(connection)
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("key_id", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_key_id", "audit", ["key_id"])
    for table in ("rewards", "audit"):
        for statement in _guards(table, connection.dialect.name):
            connection.exec_driver_sql(statement)


def _chain(connection: sa.Connection) -> None:
    """The rewards on record, in their order, as if they had been chained from the start."""
    names = (
        "id",
        "rollout_id",
        "attempt",
        "value",
        "scope",
        "source",
        "detail",
        "created_at",
        "key_id",
        "number",
        "hash",
    )
    rewards = sa.table("rewards", *(sa.column(name, sa.JSON if name == "detail" else None) for name in names))
    rollouts = sa.table("rollouts", sa.column("id"), sa.column("reward_head"))
    ordered = sa.select(rewards).order_by(rewards.c.rollout_id, rewards.c.created_at, rewards.c.id)
    rows = [dict(row) for row in connection.execute(ordered).mappings()]
    for rollout_id, mine in groupby(rows, key=lambda row: row["rollout_id"]):
        previous = ""
        for number, row in enumerate(mine):
            row["number"] = number
            content = json.dumps([previous, *(row[name] for name in FIELDS)], sort_keys=True)
            previous = hashlib.sha256(content.encode()).hexdigest()
            change = sa.update(rewards).where(rewards.c.id == row["id"])
            connection.execute(change.values(number=number, hash=previous))
        connection.execute(sa.update(rollouts).where(rollouts.c.id == rollout_id).values(reward_head=previous))


def _guards(table: str, dialect: str) -> list[str]:
    if dialect == "sqlite":
        refuse = f"BEGIN SELECT RAISE(ABORT, '{table} are append-only'); END"
        return [
            f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse}",
            f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {refuse}",
        ]
    return [
        f"CREATE FUNCTION {table}_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{table} are append-only'; END $$",
        f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION {table}_append_only()",
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_append_only()",
    ]
