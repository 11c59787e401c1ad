"""Trainers' numbers for sampled tokens stand beside the calls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rolltap.calllog.schema import guards, separate

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    connection = op.get_bind()
    table = op.create_table(
        "annotations",
        sa.Column("call_id", sa.Text, primary_key=True),
        sa.Column("token", sa.BigInteger, primary_key=True),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("harness", sa.Text, nullable=False),
        sa.Column("trainer", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("compared", sa.Integer, nullable=False),
        sa.Column("mismatch_sum", sa.Double, nullable=False),
        sa.Column("mismatch_max", sa.Double, nullable=False),
        sa.Column("fresh", sa.Integer, nullable=False),
        sa.Column("fresh_sum", sa.Double, nullable=False),
        sa.Column("kept", sa.Integer, nullable=False),
        sa.Column("clipped", sa.Integer, nullable=False),
        sa.Column("streams", sa.LargeBinary, nullable=False),
    )
    op.create_index("annotations_of_session", "annotations", ["session_id", "token"])
    sums = ["compared", "mismatch_sum", "mismatch_max", "fresh", "fresh_sum", "kept", "clipped"]
    op.create_index(
        "annotations_of_policy", "annotations", ["policy", "group_id", "harness", "call_id", "token", *sums]
    )
    for statement in guards("annotations", connection.dialect.name, until_pruned=True):
        connection.exec_driver_sql(statement)
    if connection.dialect.name == "postgresql":
        separate(connection, [table])
