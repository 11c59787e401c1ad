"""A control belongs to the run that set it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    if sa.inspect(op.get_bind()).has_table("controls"):
        op.add_column("controls", sa.Column("run", sa.String))
