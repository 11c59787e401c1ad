"""Turn caps of policies. They can change during training, for a curriculum."""

from __future__ import annotations

import sqlalchemy as sa

from rolltap.errors import InvalidRequest
from rolltap.ledger.policies import locked_policy
from rolltap.ledger.schema import turn_caps
from rolltap.ledger.unit_of_work import Tx, UnitOfWork


class TurnCaps:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def set(self, policy: str, turns: int) -> None:
        """Sets the cap for attempts that begin from now on; 0 removes it."""
        if turns < 0:
            raise InvalidRequest(f"turns: the cap must be 0 (no cap) or more, not {turns}", param="turns")

        def work(tx: Tx) -> None:
            locked_policy(tx, policy)
            tx.run(sa.delete(turn_caps).where(turn_caps.c.policy == policy))
            tx.run(turn_caps.insert().values(policy=policy, turns=turns))
            tx.note("turn_cap", policy, turns=turns)

        await self._uow.transact(work)

    async def of(self, policy: str, requested: int) -> int:
        """The lower of the policy's cap and `requested`; 0 if there is no cap."""
        statement = sa.select(turn_caps.c.turns).where(turn_caps.c.policy == policy)
        cap = await self._uow.query(lambda tx: tx.scalar(statement)) or 0
        return min(cap, requested) if cap and requested else cap or requested
