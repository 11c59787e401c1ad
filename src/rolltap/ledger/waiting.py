"""Why a submission waits: for a node, for its trainers to consume groups, or for their curriculum.

A node is alive if it has claims, or has asked for work within `NODE_MEMORY` seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rolltap.ledger.base import LedgerSettings
from rolltap.ledger.policies import demands_of, room
from rolltap.ledger.schema import groups, nodes, rollouts
from rolltap.ledger.task_queue import opens_any
from rolltap.ledger.unit_of_work import Tx
from rolltap.moments import utc_text
from rolltap.types import GroupStatus, RolloutStatus

NODE_MEMORY = 60.0
"""Seconds. A waiting node asks again sooner, as the longest wait of a claim is shorter."""

FORGOTTEN_AFTER = 86_400.0


def note_node(tx: Tx, name: str, submission: str | None) -> None:
    """Records that the node asks for work now. Deletes nodes that have not asked for a day."""
    tx.run(sa.delete(nodes).where(nodes.c.asked_at < tx.now - FORGOTTEN_AFTER))
    values = {"submission_id": submission, "asked_at": tx.now}
    if not tx.insert_new(nodes, {"name": name, **values}):
        tx.run(sa.update(nodes).where(nodes.c.name == name).values(values))


def waits_for(tx: Tx, submission: Any, queued: int, settings: LedgerSettings) -> str:
    """What the unclaimed work of a submission (its row) waits for, as text; "" if all of it runs."""
    free = (
        sa.select(sa.func.count())
        .select_from(rollouts.join(groups, groups.c.id == rollouts.c.group_id))
        .where(groups.c.submission_id == submission.id, groups.c.status == GroupStatus.OPEN)
        .where(rollouts.c.status == RolloutStatus.PENDING, rollouts.c.node_token.is_(None))
    )
    unclaimed = tx.scalar(free)
    if not unclaimed and queued and not opens_any(tx, submission.id):
        return f"the curriculum of policy {submission.policy}: it names none of the {queued:,} queued tasks"
    if unclaimed or (queued and room(tx, submission.policy, settings.trainer_silence) != 0):
        return _for_a_node(tx, submission.id)
    return _for_trainers(tx, submission.policy, settings) if queued else ""


def _for_a_node(tx: Tx, submission: str) -> str:
    serves = sa.or_(nodes.c.submission_id.is_(None), nodes.c.submission_id == submission)
    holding = sa.exists().where(rollouts.c.node == nodes.c.name, rollouts.c.node_expires_at > tx.now)
    known = sa.select(nodes).where(serves).order_by(nodes.c.name)
    alive = tx.all(known.where(sa.or_(nodes.c.asked_at > tx.now - NODE_MEMORY, holding)))
    if alive:
        return f"a free slot of {_some([row.name for row in alive])}"
    last = tx.first(sa.select(nodes).where(serves).order_by(nodes.c.asked_at.desc()).limit(1))
    last_node = f"; the last one, {last.name}, asked at {_time(last.asked_at)}" if last else ""
    return f"a node: none asks for work (`rolltap node`){last_node}"


def _for_trainers(tx: Tx, policy: str, settings: LedgerSettings) -> str:
    demands = demands_of(tx, policy, settings.trainer_silence)
    who = _some([f"{row.trainer} (last heard of at {_time(row.seen_at)})" for row in demands])
    of_policy = sa.select(groups.c.status, sa.func.count()).where(groups.c.policy == policy)
    counts = dict(map(tuple, tx.all(of_policy.group_by(groups.c.status))))
    there = ", ".join(
        f"{counts.get(status, 0)} {name}"
        for status, name in (
            (GroupStatus.COMPLETE, "ready"),
            (GroupStatus.LEASED, "leased"),
            (GroupStatus.OPEN, "under way"),
        )
    )
    return f"room at the trainers of {policy}: {who}; groups: {there}"


def _some(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _time(at: float) -> str:
    return utc_text(at, "%Y-%m-%d %H:%M:%SZ")
