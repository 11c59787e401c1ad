"""Annotations by a trainer: of calls in its open leases, or in acknowledged ones that were not rewound."""

from __future__ import annotations

import json

import sqlalchemy as sa

from rolltap.calllog.annotations import AnnotationLine, AnnotationSource, append_annotations
from rolltap.calllog.schema import sessions
from rolltap.contract.trainer import AnnotateLease
from rolltap.errors import LeaseLost
from rolltap.ledger.leases import LeaseKey, locked_lease
from rolltap.ledger.schema import groups, lease_groups, rollouts, tasks
from rolltap.ledger.unit_of_work import Tx


def annotate(tx: Tx, key: LeaseKey, posted: AnnotateLease) -> tuple[str, list[AnnotationLine]]:
    """Appends annotations of the lease's calls, all or none; returns the lease's policy and the new annotations.

    A retry has no effect. After a crash the trainer rewinds and leases the groups again under another token.
    """
    lease = locked_lease(tx, key)
    if lease.status not in ("open", "acknowledged"):
        raise LeaseLost(f"lease {key.id} is {lease.status}")
    if lease.status == "open" and lease.expires_at <= tx.now:
        raise LeaseLost(f"lease {key.id} expired {tx.now - lease.expires_at:.1f} s ago; extend leases in time")
    source = AnnotationSource(
        token=lease.token,
        lease_id=lease.id,
        policy=lease.policy,
        trainer=lease.trainer,
        step=lease.step,
        version=posted.version,
        sessions=_sessions(tx, lease.token),
    )
    return lease.policy, append_annotations(tx.connection, tx.now, source, posted.calls)


def _sessions(tx: Tx, token: int) -> dict[str, tuple[str, str]]:
    """The sessions of a lease's rollouts, each with its group and harness."""
    query = (
        sa.select(rollouts.c.session_id, rollouts.c.group_id, sessions.c.tags, tasks.c.spec)
        .join(lease_groups, lease_groups.c.group_id == rollouts.c.group_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .join(tasks, tasks.c.digest == groups.c.task_digest)
        .join(sessions, sessions.c.id == rollouts.c.session_id)
        .where(lease_groups.c.token == token)
    )
    return {
        row.session_id: (row.group_id, str(json.loads(row.tags).get("harness") or row.spec.get("harness") or ""))
        for row in tx.all(query)
    }
