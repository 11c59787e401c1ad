"""Several trained policies in one rollout: a group for each, which share the rollouts of the first."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0103"
down_revision = "0102"


def upgrade() -> None:
    op.add_column("submissions", sa.Column("also", sa.JSON))
    op.add_column("groups", sa.Column("shares", sa.String))
    op.create_index("ix_groups_shares", "groups", ["shares"])
    op.add_column("leases", sa.Column("served", sa.Integer))
