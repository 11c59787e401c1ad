"""The current state of a policy's run: waiting work, leases, nodes and dead groups. Read-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.ledger.reading import has_ledger
from rolltap.ledger.schema import groups, lease_groups, leases, rollouts, submissions, submitted, trainers
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import GroupStatus

GIVEN_UP = 20
"""Maximum number of listed dead groups."""


@dataclass(frozen=True, slots=True)
class LeaseLine:
    """An open lease. `step` is the last one that its trainer acknowledged."""

    trainer: str
    groups: int
    replay: bool
    step: int | None
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A node with claims on the policy's rollouts, which expire at `expires_at` without a heartbeat."""

    name: str
    rollouts: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class DeadLine:
    """A dead group with the last reason."""

    group_id: str
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunState:
    """`waiting_tasks`: submitted tasks without a group. `waiting_rollouts`: unclaimed rollouts of open groups."""

    waiting_tasks: int
    waiting_rollouts: int
    leases: tuple[LeaseLine, ...]
    nodes: tuple[NodeLine, ...]
    dead: tuple[DeadLine, ...]


def run_state(connection: sa.Connection, policy: str) -> RunState:
    if not has_ledger(connection):
        return RunState(0, 0, (), (), ())
    tx = Tx(connection, 0.0)
    tasks = sa.select(sa.func.count()).select_from(submitted.join(submissions))
    tasks = tasks.where(
        submitted.c.group_id.is_(None), submissions.c.policy == policy, submissions.c.cancelled_at.is_(None)
    )
    of_policy = sa.select(groups.c.id).where(groups.c.policy == policy, groups.c.status == GroupStatus.OPEN)
    waiting = sa.select(sa.func.count()).where(
        rollouts.c.group_id.in_(of_policy), rollouts.c.status == "pending", rollouts.c.node.is_(None)
    )
    return RunState(
        tx.scalar(tasks) or 0,
        tx.scalar(waiting) or 0,
        tuple(LeaseLine(*row) for row in tx.all(_leases(policy))),
        tuple(NodeLine(*row) for row in tx.all(_nodes(policy))),
        tuple(DeadLine(*row) for row in tx.all(_dead(policy))),
    )


def _leases(policy: str) -> sa.Select[*tuple[Any, ...]]:
    groups = sa.select(sa.func.count()).where(lease_groups.c.token == leases.c.token).scalar_subquery()
    return (
        sa.select(leases.c.trainer, groups, leases.c.replay, trainers.c.step, leases.c.created_at, leases.c.expires_at)
        .join(trainers, trainers.c.name == leases.c.trainer)
        .where(leases.c.policy == policy, leases.c.status == "open")
        .order_by(leases.c.created_at)
    )


def _nodes(policy: str) -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(rollouts.c.node, sa.func.count(), sa.func.max(rollouts.c.node_expires_at))
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(groups.c.policy == policy, rollouts.c.node_expires_at.is_not(None), rollouts.c.node.is_not(None))
        .where(rollouts.c.status.in_(("pending", "running")))
        .group_by(rollouts.c.node)
        .order_by(rollouts.c.node)
    )


def _dead(policy: str) -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(groups.c.id, groups.c.failures, groups.c.reason)
        .where(groups.c.policy == policy, groups.c.status == GroupStatus.DEAD)
        .order_by(groups.c.created_at.desc())
        .limit(GIVEN_UP)
    )
