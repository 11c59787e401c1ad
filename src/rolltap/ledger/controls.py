"""Controls: what a policy's trainer has set for the rollouts to come (`rolltap.contract.control`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rolltap.contract.base import values_of
from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import OwnerRequest
from rolltap.ledger.policies import locked_policy, owned_policy
from rolltap.ledger.schema import controls
from rolltap.ledger.unit_of_work import Tx, UnitOfWork


class Controls:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def set(self, policy: str, control: RolloutControl, by: OwnerRequest | None = None) -> None:
        """Replaces the policy's control. Raises `TrainerFenced` unless `by`, if given, owns the policy."""

        def work(tx: Tx) -> None:
            if by is None:
                locked_policy(tx, policy)
            else:
                owned_policy(tx, policy, by)
            tx.run(sa.delete(controls).where(controls.c.policy == policy))
            values = {**values_of(control), "curriculum": control.curriculum or None}
            tx.run(controls.insert().values(policy=policy, **values))
            tx.note("control_set", policy, trainer=by.trainer if by else None, **values_of(control))

        await self._uow.transact(work)

    async def of(self, policy: str) -> RolloutControl:
        """The policy's control; an empty one if none was set."""
        rows = await self._uow.select(sa.select(controls).where(controls.c.policy == policy))
        return _control(rows[0]) if rows else RolloutControl()


def controls_in_force(tx: Tx) -> Mapping[str, RolloutControl]:
    """The control of each policy for which something is set."""
    by_policy = {row.policy: _control(row) for row in tx.all(sa.select(controls))}
    return {policy: control for policy, control in by_policy.items() if control != RolloutControl()}


def _control(row: Any) -> RolloutControl:
    return RolloutControl(row.max_turns, row.temperature, row.n, row.priority, row.curriculum or {})
