"""Version numbers only grow: a rewind abandons those after the restored one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    if not sa.inspect(op.get_bind()).has_table("policies"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.create_table(
        "abandoned",
        sa.Column("policy", sa.String, sa.ForeignKey("policies.name"), primary_key=True),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("last", sa.Integer, primary_key=True),
    )
    # In words of its own: Alembic would make a SQLite table anew, which it can't where rows of others point to it.
    op.execute("ALTER TABLE policies DROP COLUMN may_go_back")
    op.execute("ALTER TABLE policies ADD COLUMN given INTEGER NOT NULL DEFAULT 0")
    op.execute("UPDATE policies SET given = version")
