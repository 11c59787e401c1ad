"""Dead letters: groups that trainers refused too often."""

from __future__ import annotations

import sqlalchemy as sa

from rolltap.errors import LedgerError, NotFound
from rolltap.ledger.base import DeadLetter
from rolltap.ledger.rows import load_groups
from rolltap.ledger.schema import groups
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import GroupStatus


def listed(tx: Tx, policy: str | None, limit: int) -> list[DeadLetter]:
    statement = sa.select(groups).where(groups.c.status == GroupStatus.DEAD).order_by(groups.c.created_at).limit(limit)
    if policy is not None:
        statement = statement.where(groups.c.policy == policy)
    rows = tx.all(statement)
    dead_groups = load_groups(tx, [row.id for row in rows])
    return [DeadLetter(group, row.reason) for group, row in zip(dead_groups, rows, strict=True)]


def revive(tx: Tx, group_id: str) -> None:
    """Makes a dead group ready again and resets its failures."""
    row = tx.first(sa.select(groups).where(groups.c.id == group_id).with_for_update(key_share=True))
    if row is None:
        raise NotFound(f"no group {group_id!r}", param="group_id")
    if row.status != GroupStatus.DEAD:
        raise LedgerError(f"group {group_id} is {row.status}, not dead")
    tx.run(sa.update(groups).where(groups.c.id == group_id).values(status=GroupStatus.COMPLETE, failures=0, reason=""))
    tx.note("group_revived", group_id, policy=row.policy)
    tx.wake_trainers()
