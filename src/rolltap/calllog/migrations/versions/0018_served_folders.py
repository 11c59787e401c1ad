"""The folder of the weights that engines serve, and since when a process has facts that are not in the store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("processes", sa.Column("waiting_since", sa.Double))
    if not sa.inspect(op.get_bind()).has_table("policies"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.add_column("policies", sa.Column("folder", sa.String))
    op.add_column("policies", sa.Column("adapter", sa.String))
