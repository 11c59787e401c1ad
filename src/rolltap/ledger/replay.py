"""Replay: leases on acknowledged groups, which stay acknowledged."""

from __future__ import annotations

import sqlalchemy as sa

from rolltap.contract.trainer import LeaseRequest, Replay
from rolltap.ledger.open_leases import OpenedLease, admit, open_lease
from rolltap.ledger.schema import groups
from rolltap.ledger.unit_of_work import Tx
from rolltap.ledger.version_history import VersionHistory, fresh
from rolltap.types import GroupStatus


def open_replay_lease(tx: Tx, request: LeaseRequest, replay: Replay) -> OpenedLease:
    """Opens a lease on acknowledged groups that match `replay`. They can be replayed any number of times."""
    history = admit(tx, request)
    group_ids = _matching(tx, request, replay, history)
    if not group_ids:
        return OpenedLease("", 0, (), history)
    token, lease_id = open_lease(tx, request, group_ids, replay=True)
    return OpenedLease(lease_id, token, group_ids, history, replay=True)


def _matching(tx: Tx, request: LeaseRequest, replay: Replay, history: VersionHistory) -> tuple[str, ...]:
    statement = sa.select(groups.c.id, groups.c.tags).where(
        groups.c.policy == request.policy,
        groups.c.status == GroupStatus.ACKNOWLEDGED,
        groups.c.oldest_version >= 0,
        groups.c.oldest_version < history.oldest(replay.min_age - 1),
    )
    if replay.max_age is not None:
        statement = statement.where(fresh(history, replay.max_age))
    if replay.min_reward is not None:
        statement = statement.where(groups.c.reward_mean >= replay.min_reward)
    if replay.max_reward is not None:
        statement = statement.where(groups.c.reward_mean <= replay.max_reward)
    newest = (groups.c.completed_at.desc(), groups.c.id.desc())
    statement = statement.order_by(*(newest if replay.order == "newest" else (sa.func.random(),)))
    group_ids: list[str] = []
    for row in tx.connection.execute(statement):
        if set(replay.tags) <= set(row.tags):
            group_ids.append(row.id)
        if len(group_ids) == request.groups:
            break
    return tuple(group_ids)
