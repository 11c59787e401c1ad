"""A control may hold rules for the sessions to come."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0101"
down_revision = "0100"


def upgrade() -> None:
    op.add_column("controls", sa.Column("rules", sa.JSON))
