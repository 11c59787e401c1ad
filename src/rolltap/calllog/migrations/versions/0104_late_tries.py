"""Late tries: a request is looked up by its id among the events."""

from __future__ import annotations

from alembic import op

revision = "0104"
down_revision = "0103"


def upgrade() -> None:
    op.create_index("ix_events_subject", "events", ["subject"])
