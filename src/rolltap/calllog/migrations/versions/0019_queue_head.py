"""The head of a submission's queue is found by an index of what is still queued."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    if sa.inspect(op.get_bind()).has_table("submitted"):
        op.execute("CREATE INDEX submitted_head ON submitted (submission_id, position) WHERE group_id IS NULL")
