"""Controls: what a policy's trainer has set for the rollouts to come (`rolltap.contract.control`).

A control that a trainer set belongs to its run: when another run takes the policy, it ends. One that was set on the
admin plane stands until it is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rolltap.contract.base import values_of
from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import OwnerRequest
from rolltap.ledger.policies import locked_policy, owned_policy
from rolltap.ledger.schema import controls, trainers
from rolltap.ledger.unit_of_work import Tx, UnitOfWork


class Controls:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def set(self, policy: str, control: RolloutControl, by: OwnerRequest | None = None) -> None:
        """Replaces the policy's control. Raises `TrainerFenced` unless `by`, if given, owns the policy."""

        def work(tx: Tx) -> None:
            run = None
            if by is None:
                locked_policy(tx, policy)
            else:
                owned_policy(tx, policy, by)
                run = tx.scalar(sa.select(trainers.c.run).where(trainers.c.name == by.trainer))
            tx.run(sa.delete(controls).where(controls.c.policy == policy))
            values = {**values_of(control), "curriculum": control.curriculum or None}
            tx.run(controls.insert().values(policy=policy, run=run, **values))
            tx.note("control_set", policy, trainer=by.trainer if by else None, **values_of(control))

        await self._uow.transact(work)

    async def of(self, policy: str) -> RolloutControl:
        """The policy's control; an empty one if none was set."""
        return (await self.with_run(policy))[0]

    async def with_run(self, policy: str) -> tuple[RolloutControl, str | None]:
        """The policy's control, an empty one if none was set; and the run that set it, None for the admin plane."""
        rows = await self._uow.select(sa.select(controls).where(controls.c.policy == policy))
        return (_control(rows[0]), rows[0].run) if rows else (RolloutControl(), None)


def end_foreign_control(tx: Tx, policy: str, run: str) -> None:
    """Ends the policy's control if another run than `run` set it."""
    foreign = sa.and_(controls.c.policy == policy, controls.c.run != run)
    row = tx.first(sa.select(controls).where(foreign))
    if row is not None:
        tx.run(sa.delete(controls).where(foreign))
        tx.note("control_ended", policy, run=row.run)


def controls_in_force(tx: Tx) -> Mapping[str, RolloutControl]:
    """The control of each policy for which something is set."""
    by_policy = {row.policy: _control(row) for row in tx.all(sa.select(controls))}
    return {policy: control for policy, control in by_policy.items() if control != RolloutControl()}


def _control(row: Any) -> RolloutControl:
    return RolloutControl(row.max_turns, row.temperature, row.n, row.priority, row.curriculum or {})
