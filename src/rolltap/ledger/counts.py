"""The counts of groups and rollouts by policy, of all that there ever were, and of queued tasks.

`policy_counts` has a row for each change (`rolltap.ledger.schema`). Those of one count are folded into one row
when there are many, so that a count is read in the same time however much is on record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import sqlalchemy as sa

from rolltap.ledger.schema import QUEUED, policy_counts
from rolltap.ledger.unit_of_work import Tx, UnitOfWork
from rolltap.tenants import current_tenant

KEY = (policy_counts.c.policy, policy_counts.c.kind, policy_counts.c.state)

MANY = 2_000
"""Changes since the last fold after which the next one is due."""

AT_ONCE = 5_000
"""Most rows of one transaction that folds."""


class Counts:
    """The counts that a database keeps, of the current tenant."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow
        self._rows_left: dict[str, int] = defaultdict(int)  # by the last fold of a tenant

    async def fold(self) -> None:
        """Adds up the changes of each count if there are many."""
        tenant = current_tenant()
        rows, last = await self._uow.query(_size)
        if rows <= 2 * self._rows_left[tenant] + MANY:
            return
        while await self._uow.transact(lambda tx: fold(tx, last)) >= AT_ONCE:
            pass
        self._rows_left[tenant], _ = await self._uow.query(_size)


def _size(tx: Tx) -> tuple[int, int]:
    """The number of rows, and the last one's."""
    rows = tx.scalar(sa.select(sa.func.count()).select_from(policy_counts))
    return rows, tx.scalar(sa.select(sa.func.max(policy_counts.c.seq))) or 0


def fold(tx: Tx, last: int) -> int:
    """Replaces the first rows up to `last`, but those that another transaction is folding, by their sums; returns their
    number."""
    first = sa.select(policy_counts.c.seq).where(policy_counts.c.seq <= last).order_by(policy_counts.c.seq)
    some = first.limit(AT_ONCE).with_for_update(skip_locked=True)
    sums: Counter[tuple[str, str, str]] = Counter()
    gone = tx.all(sa.delete(policy_counts).where(policy_counts.c.seq.in_(some)).returning(*KEY, policy_counts.c.n))
    for row in gone:
        sums[row.policy, row.kind, row.state] += row.n
    rows = [{"policy": key[0], "kind": key[1], "state": key[2], "n": n} for key, n in sums.items() if n]
    tx.run(policy_counts.insert(), rows)
    return len(gone)


def counted(tx: Tx, policy: str) -> Mapping[str, Mapping[str, int]]:
    """The counts of a policy, but those of 0, by kind and state; of a kind without any, `{}`."""
    total = sa.cast(sa.func.sum(policy_counts.c.n), sa.BigInteger).label("total")
    statement = sa.select(policy_counts.c.kind, policy_counts.c.state, total).where(policy_counts.c.policy == policy)
    by_kind: dict[str, dict[str, int]] = defaultdict(dict)
    for row in tx.all(statement.group_by(policy_counts.c.kind, policy_counts.c.state)):
        if row.total:
            by_kind[row.kind][row.state] = row.total
    return by_kind


def count_queued(tx: Tx) -> int:
    """The queued tasks of all policies."""
    return int(tx.scalar(sa.select(sa.func.sum(policy_counts.c.n)).where(policy_counts.c.kind == QUEUED)) or 0)
