"""What agents tried is counted on their rollouts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    if not sa.inspect(op.get_bind()).has_table("rollouts"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.add_column("rollouts", sa.Column("tampering", sa.JSON))
    op.create_table(
        "tampering",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("session_id", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tampering_session_id", "tampering", ["session_id"])
