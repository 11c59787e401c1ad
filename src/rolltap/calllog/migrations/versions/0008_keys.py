"""Keys are minted, each with a role; a claim and an attempt record the key that made them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    if not sa.inspect(op.get_bind()).has_table("rollouts"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.create_table(
        "keys",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("policies", sa.JSON),
        sa.Column("minted_by", sa.String, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_table(
        "key_secrets",
        sa.Column("hash", sa.String, primary_key=True),
        sa.Column("key_id", sa.String, sa.ForeignKey("keys.id"), nullable=False),
        sa.Column("expires_at", sa.Double),
    )
    op.create_index("ix_key_secrets_key_id", "key_secrets", ["key_id"])
    op.add_column("rollouts", sa.Column("node_key", sa.String))
    op.add_column("attempts", sa.Column("key_id", sa.String))
    op.create_index("ix_attempts_key_id", "attempts", ["key_id"])
