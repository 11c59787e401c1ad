"""Trainers control the rollouts to come: the turn caps on record become controls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rolltap.calllog.schema import separate

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    connection = op.get_bind()
    if not sa.inspect(connection).has_table("turn_caps"):
        return  # only the call log was ever used here: the ledger's tables are made as declared
    tables = sa.MetaData()
    sa.Table("policies", tables, sa.Column("name", sa.String, primary_key=True))
    controls = sa.Table(
        "controls",
        tables,
        sa.Column("policy", sa.ForeignKey("policies.name"), primary_key=True),
        sa.Column("max_turns", sa.Integer),
        sa.Column("temperature", sa.Double),
        sa.Column("n", sa.Integer),
        sa.Column("priority", sa.Integer),
        sa.Column("curriculum", sa.JSON),
    )
    for reference in controls.foreign_key_constraints:
        reference.ddl_if(dialect="sqlite")  # on Postgres `separate` makes it, with the tenant
    controls.create(connection)
    if connection.dialect.name == "postgresql":
        separate(connection, [controls])
        op.execute(
            "INSERT INTO controls (policy, max_turns, tenant) "
            "SELECT policy, turns, tenant FROM turn_caps WHERE turns > 0"
        )
    else:
        op.execute("INSERT INTO controls (policy, max_turns) SELECT policy, turns FROM turn_caps WHERE turns > 0")
    op.drop_table("turn_caps")
