"""What `rolltap log prune` removed is on record: a session without calls, or one whose calls are gone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "prunings",
        sa.Column("session_id", sa.Text, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("calls", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
