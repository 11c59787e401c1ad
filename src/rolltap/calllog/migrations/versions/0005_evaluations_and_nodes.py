"""What evaluators saw is kept, and which nodes ask for work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    if not sa.inspect(op.get_bind()).has_table("groups"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.create_table(
        "evaluations",
        sa.Column("rollout_id", sa.String, sa.ForeignKey("rollouts.id"), primary_key=True),
        sa.Column("seen", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("submission_id", sa.String),
        sa.Column("asked_at", sa.Double, nullable=False),
    )
