"""A policy is owned by one incarnation of one trainer, and a version's weights are known by their digest."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    if not sa.inspect(op.get_bind()).has_table("policies"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.create_table(
        "version_digests",
        sa.Column("policy", sa.String, sa.ForeignKey("policies.name"), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String, nullable=False),
    )
    # In words of its own: Alembic would make a SQLite table anew, which it can't where rows of others point to it.
    time = sa.Double().compile(dialect=op.get_bind().dialect)
    op.execute("ALTER TABLE policies ADD COLUMN owner VARCHAR")
    op.execute(f"ALTER TABLE policies ADD COLUMN owned_since {time}")
    op.execute("ALTER TABLE trainers ADD COLUMN run VARCHAR")
    op.execute("ALTER TABLE trainers ADD COLUMN incarnation INTEGER NOT NULL DEFAULT 0")
    op.execute(f"ALTER TABLE trainers ADD COLUMN started_at {time}")
