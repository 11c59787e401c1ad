"""Opens leases on ready groups, and ends leases.

A lease is a row with an expiry by the database's clock. Its groups refer to it by its fencing token, a number that only
grows. No transaction stays open while a trainer works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.contract.trainer import LeaseRequest
from rolltap.ids import new_id
from rolltap.ledger.base import NOTHING_TO_TRAIN, LedgerSettings
from rolltap.ledger.completion import drop
from rolltap.ledger.ownership import check_owner, lock_incarnation
from rolltap.ledger.policies import policy_row, shared_policy
from rolltap.ledger.schema import demands, groups, lease_groups, leases
from rolltap.ledger.unit_of_work import Tx
from rolltap.ledger.version_history import VersionHistory, fresh, history_of, partly_fresh
from rolltap.types import GroupStatus


@dataclass(frozen=True, slots=True)
class OpenedLease:
    """A lease and its groups. If no group was ready, there is no lease and `token` is 0."""

    id: str
    token: int
    group_ids: tuple[str, ...]
    history: VersionHistory
    replay: bool = False
    mask_beyond: int | None = None  # tokens with a greater staleness lose their loss


def open_ready_lease(tx: Tx, request: LeaseRequest, *, at_least: int = 1) -> OpenedLease:
    """Opens a lease on ready groups: highest priority first, then longest ready. None if fewer than `at_least`."""
    history = announce(tx, request)
    ready = (
        sa.select(groups.c.id)
        .where(*_takeable(request, history), groups.c.status == GroupStatus.COMPLETE)
        .order_by(groups.c.priority.desc(), groups.c.completed_at, groups.c.id)
        .limit(request.groups)
        .with_for_update(skip_locked=True, key_share=True)
    )
    group_ids = tuple(row.id for row in tx.all(ready))
    if len(group_ids) < at_least:
        return OpenedLease("", 0, (), history)
    token, lease_id = open_lease(tx, request, group_ids, replay=False)
    tx.run(sa.update(groups).where(groups.c.id.in_(group_ids)).values(status=GroupStatus.LEASED, lease_token=token))
    mask_beyond = request.max_staleness if request.stale == "mask" else None
    return OpenedLease(lease_id, token, group_ids, history, mask_beyond=mask_beyond)


def announce(tx: Tx, request: LeaseRequest) -> VersionHistory:
    """Records the trainer's demand, ends expired leases and drops groups that are empty or too stale."""
    history = admit(tx, request)
    note_demand(tx, request)
    expire(tx)
    _drop_untrained(tx, request.policy)
    if request.max_staleness is not None and request.stale != "keep":
        _drop_stale(tx, request.policy, _fresh_enough(request, history, request.max_staleness))
    return history


def admit(tx: Tx, request: LeaseRequest) -> VersionHistory:
    """The policy's version history. Raises `TrainerFenced` if another trainer owns the policy."""
    lock_incarnation(tx, request.trainer, request.incarnation)
    policy = shared_policy(tx, request.policy)
    check_owner(policy, request.trainer)
    return history_of(tx, policy)


def open_lease(tx: Tx, request: LeaseRequest, group_ids: Sequence[str], *, replay: bool) -> tuple[int, str]:
    """Inserts a lease on the groups; returns its fencing token and id."""
    lease_id = new_id()
    values = {
        "id": lease_id,
        "trainer": request.trainer,
        "policy": request.policy,
        "replay": replay,
        "status": "open",
        "created_at": tx.now,
        "expires_at": tx.now + request.ttl,
    }
    token: int = tx.connection.execute(leases.insert().values(values).returning(leases.c.token)).scalar_one()
    rows = [{"token": token, "group_id": id, "position": position} for position, id in enumerate(group_ids)]
    tx.run(lease_groups.insert(), rows)
    tx.note("leased", lease_id, trainer=request.trainer, policy=request.policy, groups=list(group_ids), replay=replay)
    return token, lease_id


def _takeable(request: LeaseRequest, history: VersionHistory) -> list[sa.ColumnElement[bool]]:
    """The condition for groups that the request may get if they are free."""
    own = [groups.c.policy == request.policy, groups.c.oldest_version >= 0]
    if request.max_staleness is None:
        return own
    return [*own, _fresh_enough(request, history, request.max_staleness)]


def _fresh_enough(request: LeaseRequest, history: VersionHistory, most: int) -> sa.ColumnElement[bool]:
    return partly_fresh(history, most) if request.stale == "mask" else fresh(history, most)


def count_ready(tx: Tx, request: LeaseRequest) -> int:
    """The number of groups that a lease would get, including those whose lease has expired."""
    expired = sa.select(leases.c.token).where(leases.c.status == "open", leases.c.expires_at <= tx.now)
    free = sa.or_(
        groups.c.status == GroupStatus.COMPLETE,
        sa.and_(groups.c.status == GroupStatus.LEASED, groups.c.lease_token.in_(expired)),
    )
    history = history_of(tx, policy_row(tx, request.policy))
    return tx.scalar(sa.select(sa.func.count()).select_from(groups).where(*_takeable(request, history), free))


def expire(tx: Tx) -> int:
    """Ends expired leases; their groups are complete again. Returns the number of leases."""
    expired_leases = (
        sa.select(leases)
        .where(leases.c.status == "open", leases.c.expires_at <= tx.now)
        .order_by(leases.c.token)
        .with_for_update(skip_locked=True, key_share=True)
    )
    expired = tx.all(expired_leases)
    for lease in expired:
        end_lease(tx, lease, "expired")
        tx.note("lease_expired", lease.id, trainer=lease.trainer, policy=lease.policy)
    return len(expired)


def end_lease(tx: Tx, lease: Any, status: str) -> int:
    """Ends a lease without acknowledgement: its groups are complete again. Returns the number of groups."""
    tx.run(sa.update(leases).where(leases.c.token == lease.token).values(status=status))
    leased_groups = sa.update(groups).where(groups.c.lease_token == lease.token, groups.c.status == GroupStatus.LEASED)
    freed = tx.run(leased_groups.values(status=GroupStatus.COMPLETE, lease_token=None))
    if freed:
        tx.wake_trainers()
    return freed


def end_undelivered(tx: Tx, token: int) -> None:
    """Ends a lease that no trainer has received, unless a rewind has ended it."""
    lease = sa.select(leases).where(leases.c.token == token, leases.c.status == "open")
    row = tx.first(lease.with_for_update(key_share=True))
    if row is not None:
        end_lease(tx, row, "undelivered")
        tx.note("lease_undelivered", row.id, trainer=row.trainer, policy=row.policy)


def fail(tx: Tx, group: Any, reason: str, settings: LedgerSettings) -> bool:
    """Counts a failure of the group; True if it is dead now."""
    dead = group.failures + 1 >= settings.max_failures
    values: dict[str, Any] = {"failures": group.failures + 1, "reason": reason}
    if dead:
        values |= {"status": GroupStatus.DEAD, "lease_token": None}
        tx.note("group_dead", group.id, policy=group.policy, reason=reason)
    tx.run(sa.update(groups).where(groups.c.id == group.id).values(values))
    return dead


def return_group(tx: Tx, group_id: str, token: int, reason: str, settings: LedgerSettings) -> None:
    """Removes a group that cannot be delivered from its lease. Counts a failure unless the lease is a replay."""
    tx.run(sa.delete(lease_groups).where(lease_groups.c.token == token, lease_groups.c.group_id == group_id))
    leased_group = sa.select(groups).where(groups.c.id == group_id, groups.c.lease_token == token)
    group = tx.first(leased_group.where(groups.c.status == GroupStatus.LEASED).with_for_update(key_share=True))
    if group is not None and not fail(tx, group, reason, settings):
        values = {"status": GroupStatus.COMPLETE, "lease_token": None}
        tx.run(sa.update(groups).where(groups.c.id == group_id).values(values))


def _drop_untrained(tx: Tx, policy: str) -> None:
    """Drops complete groups without a trained token: a step on them would change no weights and age all others.

    They are dropped here, not when they complete: a policy without a trainer has groups for exports only.
    """
    untrained = (
        sa.select(groups.c.id)
        .where(groups.c.policy == policy, groups.c.status == GroupStatus.COMPLETE, groups.c.oldest_version < 0)
        .with_for_update(skip_locked=True, key_share=True)
    )
    for row in tx.all(untrained):
        drop(tx, row.id, NOTHING_TO_TRAIN)


def _drop_stale(tx: Tx, policy: str, fresh_enough: sa.ColumnElement[bool]) -> None:
    stale = (
        sa.select(groups.c.id, groups.c.oldest_version)
        .where(groups.c.policy == policy, groups.c.status == GroupStatus.COMPLETE, sa.not_(fresh_enough))
        .with_for_update(skip_locked=True, key_share=True)
    )
    rows = tx.all(stale)
    if not rows:
        return
    ids = [row.id for row in rows]
    tx.run(sa.update(groups).where(groups.c.id.in_(ids)).values(status=GroupStatus.STALE, reason="too stale"))
    for row in rows:
        tx.note("group_stale", row.id, policy=policy, oldest_version=row.oldest_version)


def note_demand(tx: Tx, request: LeaseRequest) -> None:
    groups_held = (
        sa.select(sa.func.count())
        .select_from(lease_groups.join(leases, leases.c.token == lease_groups.c.token))
        .where(leases.c.trainer == request.trainer, leases.c.policy == request.policy, leases.c.replay.is_(False))
        .where(leases.c.status == "open", leases.c.expires_at > tx.now)
    )
    values = {
        "batch": request.batch or request.groups + tx.scalar(groups_held),
        "max_staleness": request.max_staleness,
        "seen_at": tx.now,
    }
    if not tx.insert_new(demands, {"trainer": request.trainer, "policy": request.policy, **values}):
        mine = sa.and_(demands.c.trainer == request.trainer, demands.c.policy == request.policy)
        tx.run(sa.update(demands).where(mine).values(values))
