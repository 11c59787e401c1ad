"""Version numbers only grow: a rewind abandons those after the restored one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    if not sa.inspect(op.get_bind()).has_table("policies"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.create_table(
        "abandoned",
        sa.Column("policy", sa.String, sa.ForeignKey("policies.name"), primary_key=True),
        sa.Column("first", sa.Integer, primary_key=True),
        sa.Column("last", sa.Integer, nullable=False),
    )
    with op.batch_alter_table("policies") as policies:
        policies.drop_column("may_go_back")
        policies.add_column(sa.Column("given", sa.Integer, nullable=False, server_default="0"))
    op.execute("UPDATE policies SET given = version")
    with op.batch_alter_table("policies") as policies:
        policies.alter_column("given", server_default=None)
