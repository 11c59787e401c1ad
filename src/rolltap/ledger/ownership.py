"""Who trains a policy: one incarnation of one trainer.

A trainer's name stands for one run: one folder of checkpoints, known by the id `run` that is kept in it. Each rewind
begins a new incarnation of the run, and makes it the owner of the policies that it restored. From then on every call
for them carries the trainer's name and incarnation. A process of an older incarnation, one that was paused or that
nobody remembers, is refused with who holds the policy and since when. So is another trainer, and another run of the
same name, unless it takes over.

A policy that nobody has claimed may be leased from by any trainer that has not rewound (its incarnation is 0). Weights
are the owner's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from rolltap.contract.trainer import Rewind
from rolltap.errors import TrainerFenced
from rolltap.ledger.schema import demands, leases, policies, trainers
from rolltap.ledger.unit_of_work import Tx


def lock_trainer(tx: Tx, name: str) -> Any:
    """The trainer's row, locked until the transaction ends; made where it is new."""
    tx.insert_new(trainers, {"name": name, "step": None, "incarnation": 0})
    return tx.first(sa.select(trainers).where(trainers.c.name == name).with_for_update(key_share=True))


def lock_incarnation(tx: Tx, name: str, incarnation: int) -> Any:
    """As `lock_trainer`; `TrainerFenced` unless `incarnation` is the trainer's current one."""
    row = lock_trainer(tx, name)
    if row.incarnation != incarnation:
        raise TrainerFenced(
            f"trainer {name!r} is held by its incarnation {row.incarnation}{_since(row.started_at)}, this call is of "
            f"{f'incarnation {incarnation}' if incarnation else 'a process that has not rewound'}: stop this process",
            param="incarnation",
        )
    return row


def check_owner(policy: Any, trainer: str) -> None:
    """`TrainerFenced` if the policy with the row `policy` is another trainer's."""
    if policy.owner not in (None, trainer):
        raise TrainerFenced(_held(policy), param="trainer")


def check_weights_owner(policy: Any, trainer: str) -> None:
    """`TrainerFenced` unless the trainer owns the policy with the row `policy`: only then it may change weights."""
    if policy.owner is None:
        raise TrainerFenced(f"policy {policy.name!r} has no trainer yet: rewind before changing its weights")
    check_owner(policy, trainer)


def new_incarnation(tx: Tx, name: str, rewind: Rewind) -> Any:
    """The trainer's row with a new incarnation; `TrainerFenced` where another run has the name."""
    row = lock_trainer(tx, name)
    if row.run not in (None, rewind.run) and not rewind.take_over:
        raise TrainerFenced(
            f"the name {name!r} is another run's{_since(row.started_at)}, with other checkpoints: give this trainer "
            "another name, or let it take over (rolltap train --take-over)",
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
    # Before the demands: an acknowledgement locks its lease, then its trainer's demand.
    others = tx.all(sa.select(leases).where(foreign).order_by(leases.c.token).with_for_update(key_share=True))
    if policy.owner != trainer:
        values = {"owner": trainer, "owned_since": tx.now}
        tx.run(sa.update(policies).where(policies.c.name == policy.name).values(values))
        tx.run(sa.delete(demands).where(demands.c.policy == policy.name, demands.c.trainer != trainer))
        tx.note("policy_owned", policy.name, trainer=trainer, before=policy.owner)
    return others


def _held(policy: Any) -> str:
    return (
        f"policy {policy.name!r} is trained by {policy.owner!r}{_since(policy.owned_since)}: stop that trainer first, "
        "then let this one take over (rolltap train --take-over)"
    )


def _since(at: float | None) -> str:
    return "" if at is None else f" since {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
