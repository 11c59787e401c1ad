"""Operations on open leases: extend, acknowledge, refuse, release, rewind.

Delivery is at least once and the effect exactly once if a trainer follows three rules:

1. It acknowledges a lease *before* it applies the lease's update, with the step that the update leads to. If the
   acknowledgement is refused, it discards the update.
2. After restoring a checkpoint of step s it first calls `rewind(trainer, s, versions)`, with the checkpoint's weight
   version of each policy. Groups acknowledged after s are not part of its weights and become available again, and so do
   the groups of its open leases. Versions after the checkpoint's are abandoned.
3. It keeps its name and its run over restarts, and sends the incarnation of its last rewind with every call. A process
   of an older incarnation is refused, and so is another trainer (`rolltap.ledger.ownership`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.contract.trainer import Rewind, Rewound
from rolltap.errors import InvalidRequest, LeaseLost, StepRegression
from rolltap.ledger.base import LedgerSettings
from rolltap.ledger.controls import end_foreign_control
from rolltap.ledger.open_leases import end_lease, fail
from rolltap.ledger.ownership import check_owner, lock_incarnation, new_incarnation, own
from rolltap.ledger.policies import locked_policy, policy_row, restore
from rolltap.ledger.schema import demands, groups, lease_groups, leases, trainers
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import GroupStatus


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """The credentials for a call on a lease: its id, its fencing token and the trainer's incarnation."""

    id: str
    token: int
    incarnation: int = 0


def locked_lease(tx: Tx, key: LeaseKey) -> Any:
    """Locks the lease and its trainer; returns the lease's row.

    Raises `LeaseLost` for a wrong token, and `TrainerFenced` if the trainer has another incarnation or does not own the
    policy.
    """
    lease_id, token = key.id, key.token
    row = tx.first(sa.select(leases.c.trainer, leases.c.policy).where(leases.c.id == lease_id))
    if row is None:
        raise LeaseLost(f"no lease {lease_id!r}")
    lock_incarnation(tx, row.trainer, key.incarnation)
    check_owner(policy_row(tx, row.policy), row.trainer)
    lease = tx.first(sa.select(leases).where(leases.c.id == lease_id).with_for_update(key_share=True))
    assert lease is not None  # leases are never deleted
    if lease.token != token:
        raise LeaseLost(f"lease {lease_id} has another fencing token than {token}", param="token")
    return lease


def _open_lease(tx: Tx, key: LeaseKey) -> Any:
    """Locks the lease, updates its trainer's `seen_at`, and returns its row. Raises `LeaseLost` if it is not open."""
    lease = locked_lease(tx, key)
    if lease.status != "open":
        raise LeaseLost(f"lease {key.id} is {lease.status}")
    if lease.expires_at <= tx.now:
        raise LeaseLost(f"lease {key.id} expired {tx.now - lease.expires_at:.1f} s ago; extend leases in time")
    of_trainer = sa.and_(demands.c.trainer == lease.trainer, demands.c.policy == lease.policy)
    tx.run(sa.update(demands).where(of_trainer).values(seen_at=tx.now))
    return lease


def extend(tx: Tx, key: LeaseKey, ttl: float) -> float:
    """Extends the lease to `ttl` seconds from now; returns `ttl`."""
    _open_lease(tx, key)
    tx.run(sa.update(leases).where(leases.c.id == key.id).values(expires_at=tx.now + ttl))
    return ttl


def acknowledge(tx: Tx, key: LeaseKey, step: int) -> int:
    """Records that the groups are part of the trainer's step `step`; returns their number. Idempotent."""
    lease, token = locked_lease(tx, key), key.token
    members = sa.select(lease_groups.c.group_id).where(lease_groups.c.token == token)
    if lease.status == "acknowledged" and lease.step == step:
        return len(tx.all(members))
    lease = _open_lease(tx, key)
    last = tx.scalar(sa.select(trainers.c.step).where(trainers.c.name == lease.trainer))
    if step < 0 or (last is not None and step < last):
        raise StepRegression(
            f"trainer {lease.trainer!r} has acknowledged step {last}; step {step} is behind it. "
            "After restoring a checkpoint, rewind first",
            param="step",
        )
    tx.run(sa.update(leases).where(leases.c.token == token).values(status="acknowledged", step=step))
    tx.run(sa.update(trainers).where(trainers.c.name == lease.trainer).values(step=step))
    acknowledgement = {"acked_by": lease.trainer, "acked_step": step, "acked_at": tx.now}
    leased_groups = sa.update(groups).where(groups.c.lease_token == token, groups.c.status == GroupStatus.LEASED)
    tx.run(leased_groups.values(status=GroupStatus.ACKNOWLEDGED, **acknowledgement))
    tx.note("acknowledged", key.id, trainer=lease.trainer, policy=lease.policy, step=step)
    return len(tx.all(members))


def refuse(tx: Tx, key: LeaseKey, reason: str, blamed: Sequence[str], settings: LedgerSettings) -> int:
    """Ends a lease whose groups the trainer could not use: they are ready again, or dead after too many failures.

    Only the `blamed` groups (default: all) count a failure; replayed groups do not change. Returns how many are dead
    now.
    """
    lease = _open_lease(tx, key)
    members = tx.all(sa.select(lease_groups.c.group_id).where(lease_groups.c.token == key.token))
    unknown = set(blamed) - {row.group_id for row in members}
    if unknown:
        raise InvalidRequest(f"lease {key.id} does not have the groups {', '.join(sorted(unknown))}", param="blamed")
    leased_groups = tx.all(
        sa.select(groups).where(groups.c.lease_token == key.token, groups.c.status == GroupStatus.LEASED)
    )
    dead = 0
    for row in leased_groups:
        failed = not blamed or row.id in blamed
        if failed:
            dead += fail(tx, row, reason, settings)
    end_lease(tx, lease, "refused")
    tx.note("refused", key.id, trainer=lease.trainer, policy=lease.policy, reason=reason)
    return dead


def release(tx: Tx, key: LeaseKey) -> None:
    """Ends an unused lease."""
    end_lease(tx, _open_lease(tx, key), "released")


def rewind(tx: Tx, trainer: str, restored: Rewind) -> Rewound:
    """Makes the groups that the trainer acknowledged after the step, and those of its open leases, available again.

    The trainer continues as a new incarnation, which owns the policies. Later versions of the policies are abandoned,
    and other trainers' leases on them end, and other runs' controls.
    """
    step = restored.step
    row = new_incarnation(tx, trainer, restored)
    foreign: list[Any] = []
    versions: dict[str, int] = {}
    for name, version in sorted(restored.versions.items()):
        end_foreign_control(tx, name, restored.run)
        foreign += own(tx, locked_policy(tx, name), trainer, take_over=restored.take_over)
        versions[name] = restore(tx, name, version)
    for lease in foreign:
        end_lease(tx, lease, "taken over")
    mine = sa.select(leases).where(leases.c.trainer == trainer).order_by(leases.c.token).with_for_update(key_share=True)
    freed = sum(end_lease(tx, lease, "rewound") for lease in tx.all(mine.where(leases.c.status == "open")))
    after = sa.and_(leases.c.policy.in_(versions), leases.c.step > step)
    undone = tx.all(mine.where(leases.c.status == "acknowledged", after))
    tokens = [lease.token for lease in undone]
    tx.run(sa.update(leases).where(leases.c.token.in_(tokens)).values(status="rewound"))
    acked = sa.and_(groups.c.policy.in_(versions), groups.c.acked_by == trainer, groups.c.acked_step > step)
    back = sa.update(groups).where(acked, groups.c.status == GroupStatus.ACKNOWLEDGED)
    cleared = {"acked_by": None, "acked_step": None, "acked_at": None, "lease_token": None}
    returned = tx.run(back.values(status=GroupStatus.COMPLETE, **cleared))
    if row.step is not None and row.step > step:
        tx.run(sa.update(trainers).where(trainers.c.name == trainer).values(step=step))
    tx.note("rewound", trainer, step=step, incarnation=row.incarnation, acknowledged=returned, leased=freed)
    tx.wake_trainers()
    return Rewound(returned, freed, versions, row.incarnation, row.step)
