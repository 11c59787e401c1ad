"""Counts of the queue, the leases and the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from rolltap.ledger.schema import leases, nodes, submissions, submitted
from rolltap.ledger.unit_of_work import Tx

NODE_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """The number of queued tasks, of open leases by policy, and of nodes that asked for work in the last minute."""

    queued: int
    leases: Mapping[str, int]
    nodes: int


def count(tx: Tx) -> LedgerCounts:
    waits = sa.and_(submitted.c.group_id.is_(None), submissions.c.cancelled_at.is_(None))
    joined = submitted.join(submissions, submissions.c.id == submitted.c.submission_id)
    is_open = sa.and_(leases.c.status == "open", leases.c.expires_at > tx.now)
    by_policy = sa.select(leases.c.policy, sa.func.count()).where(is_open).group_by(leases.c.policy)
    active_nodes = sa.select(sa.func.count()).select_from(nodes).where(nodes.c.asked_at > tx.now - NODE_SILENCE_S)
    return LedgerCounts(
        queued=tx.scalar(sa.select(sa.func.count()).select_from(joined).where(waits)),
        leases=dict(map(tuple, tx.all(by_policy))),
        nodes=tx.scalar(active_nodes),
    )
