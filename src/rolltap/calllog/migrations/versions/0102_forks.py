"""Forks: where a session was forked from another one, and a rollout from another one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0102"
down_revision = "0101"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("origin_session", sa.Text))
    op.add_column("sessions", sa.Column("origin_call", sa.Text))
    op.add_column("sessions", sa.Column("origin_at", sa.Integer))
    op.add_column("rollouts", sa.Column("parent", sa.JSON))
    op.create_index("ix_sessions_origin_session", "sessions", ["origin_session"])
