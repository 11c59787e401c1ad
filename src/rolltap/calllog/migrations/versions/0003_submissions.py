"""Tasks wait in a queue: submissions, their tasks, and their groups."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    if not sa.inspect(op.get_bind()).has_table("groups"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.create_table(
        "submissions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("policy", sa.String, sa.ForeignKey("policies.name"), nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("rule", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("cancelled_at", sa.Double),
    )
    op.create_table(
        "submitted",
        sa.Column("submission_id", sa.String, sa.ForeignKey("submissions.id"), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("task_digest", sa.String, sa.ForeignKey("tasks.digest"), nullable=False),
        sa.Column("group_id", sa.String),
        sa.Index("submitted_queue", "group_id", "submission_id"),
    )
    # In words of its own: Alembic adds no constraint to a SQLite table, where a column may bring its own.
    op.execute("ALTER TABLE groups ADD COLUMN submission_id VARCHAR REFERENCES submissions (id)")
    op.create_index("ix_groups_submission_id", "groups", ["submission_id"])
    op.create_index("rollouts_by_claim", "rollouts", ["node_expires_at"])
