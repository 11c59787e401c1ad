"""Several policies play in a rollout, each in a role; a failed or timed-out rollout records who caused it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    if not sa.inspect(op.get_bind()).has_table("groups"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    op.add_column("submissions", sa.Column("roles", sa.JSON))
    op.add_column("groups", sa.Column("roles", sa.JSON))
    op.add_column("rollouts", sa.Column("cause", sa.String))
    # Until now only agents timed out, and only nodes lost rollouts; failures did not tell.
    op.execute("UPDATE rollouts SET cause = 'agent' WHERE status = 'timed_out'")
    op.execute("UPDATE rollouts SET cause = 'infrastructure' WHERE status = 'lost'")
