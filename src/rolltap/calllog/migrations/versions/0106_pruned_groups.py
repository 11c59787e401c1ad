"""Pruned groups: their rewards may be deleted, and a group's leases are found. `rolltap.calllog.versions` creates the
table itself."""

from __future__ import annotations

from alembic import op

revision = "0106"
down_revision = "0105"


def upgrade() -> None:
    from rolltap.ledger.schema import reward_guards

    op.create_index("lease_groups_by_group", "lease_groups", ["group_id"])
    dialect = op.get_bind().dialect.name
    former = ["DROP TRIGGER rewards_no_update", "DROP TRIGGER rewards_no_delete"]
    if dialect == "postgresql":
        former = [f"DROP TRIGGER rewards_no_{what} ON rewards" for what in ("change", "truncate")]
        former.append("DROP FUNCTION rewards_append_only()")
    for statement in (*former, *reward_guards(dialect)):
        op.get_bind().exec_driver_sql(statement)
