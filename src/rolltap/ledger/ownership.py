"""Ownership of policies: one incarnation of one trainer owns a policy.

A trainer's name belongs to one run: one folder of checkpoints, which contains the run's id. Each rewind starts a new
incarnation of the run and makes it the owner of the restored policies. From then on every call for them contains the
trainer's name and incarnation. Calls of an older incarnation are refused; the error names the owner and its start. So
are calls of another trainer, and of another run with the same name, unless it takes over.

A policy without an owner can be leased by any trainer that has not rewound (incarnation 0). Only an owner may change
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rolltap.contract.trainer import Rewind
from rolltap.errors import TrainerFenced
from rolltap.ledger.schema import demands, leases, policies, trainers
from rolltap.ledger.unit_of_work import Tx
from rolltap.moments import utc_text


def lock_trainer(tx: Tx, name: str) -> Any:
    """The trainer's row, created if it is new, and locked until the transaction ends."""
    tx.insert_new(trainers, {"name": name, "step": None, "incarnation": 0})
    return tx.first(sa.select(trainers).where(trainers.c.name == name).with_for_update(key_share=True))


def lock_incarnation(tx: Tx, name: str, incarnation: int) -> Any:
    """Like `lock_trainer`. Raises `TrainerFenced` unless `incarnation` is the trainer's current one."""
    row = lock_trainer(tx, name)
    if row.incarnation != incarnation:
        raise TrainerFenced(
            f"trainer {name!r} has the newer incarnation {row.incarnation}{_since(row.started_at)}; this call is from "
            + (
                f"incarnation {incarnation}: stop this process"
                if incarnation
                else "a process that has not rewound: stop this process, or send `incarnation` from rewind's reply"
            ),
            param="incarnation",
        )
    return row


TAKE_OVER = "rolltap train --take-over; in a client, rewind(..., take_over=True)"


def check_owner(policy: Any, trainer: str) -> None:
    """Raises `TrainerFenced` if another trainer owns the policy with the row `policy`."""
    if policy.owner not in (None, trainer):
        raise TrainerFenced(
            f"policy {policy.name!r} is trained by {policy.owner!r}{_since(policy.owned_since)}: stop that trainer "
            f"first, then let this one take over ({TAKE_OVER})",
            param="trainer",
        )


def check_weights_owner(policy: Any, trainer: str) -> None:
    """Raises `TrainerFenced` unless the trainer owns the policy with the row `policy`, as weight changes require."""
    if policy.owner is None:
        raise TrainerFenced(f"policy {policy.name!r} has no trainer yet: rewind before changing its weights")
    check_owner(policy, trainer)


def new_incarnation(tx: Tx, name: str, rewind: Rewind) -> Any:
    """Starts a new incarnation; returns the trainer's row. Raises `TrainerFenced` if another run has the name."""
    row = lock_trainer(tx, name)
    if row.run not in (None, rewind.run) and not rewind.take_over:
        raise TrainerFenced(
            f"the name {name!r} belongs to another run{_since(row.started_at)}, with other checkpoints: give this "
            f"trainer another name, or let it take over ({TAKE_OVER})",
            param="run",
        )
    values = {"run": rewind.run, "incarnation": row.incarnation + 1, "started_at": tx.now}
    tx.run(sa.update(trainers).where(trainers.c.name == name).values(values))
    return tx.first(sa.select(trainers).where(trainers.c.name == name))


def own(tx: Tx, policy: Any, trainer: str, *, take_over: bool) -> Sequence[Any]:
    """Makes the trainer the owner of the policy with the locked row `policy`; returns the others' open leases on it."""
    if not take_over:
        check_owner(policy, trainer)
    foreign = sa.and_(leases.c.policy == policy.name, leases.c.trainer != trainer, leases.c.status == "open")
    # Lock leases before demands, in the same order as an acknowledgement.
    others = tx.all(sa.select(leases).where(foreign).order_by(leases.c.token).with_for_update(key_share=True))
    if policy.owner != trainer:
        values = {"owner": trainer, "owned_since": tx.now}
        tx.run(sa.update(policies).where(policies.c.name == policy.name).values(values))
        tx.run(sa.delete(demands).where(demands.c.policy == policy.name, demands.c.trainer != trainer))
        tx.note("policy_owned", policy.name, trainer=trainer, before=policy.owner)
    return others


def _since(at: float | None) -> str:
    return "" if at is None else f" since {utc_text(at)}"
