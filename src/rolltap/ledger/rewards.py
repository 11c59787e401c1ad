"""Rewards: appended facts. A reward counts for the attempt that was current when it came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rolltap.contract.admin import NewReward
from rolltap.contract.keys import SERVER, Caller
from rolltap.errors import LedgerError
from rolltap.ids import new_id
from rolltap.ledger.completion import settle
from rolltap.ledger.rollouts import check_own
from rolltap.ledger.rows import locked_group, reward_of
from rolltap.ledger.schema import rewards
from rolltap.ledger.unit_of_work import Tx, UnitOfWork
from rolltap.types import Reward


class Rewards:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def append(self, reward: NewReward, by: Caller = SERVER) -> Reward:
        """Appends; the same `id` with the same content again changes nothing, with another is refused.

        May come after the rollout has ended, and completes its group if that was all it waited for. A reward for an
        attempt that is not the last one is refused.
        """
        id = reward.id or new_id()

        def work(tx: Tx) -> Reward:
            rollout, group = locked_group(tx, reward.rollout_id)
            check_own(tx, rollout.id, by)
            known = tx.first(sa.select(rewards).where(rewards.c.id == id))
            if known is not None:
                _check_same(known, reward)
                return reward_of(known)
            if reward.attempt is not None and reward.attempt != rollout.attempt:
                raise LedgerError(
                    f"rollout {rollout.id} is at attempt {rollout.attempt}; a reward for attempt {reward.attempt} "
                    "comes too late",
                    param="attempt",
                )
            values = {
                "id": id,
                "rollout_id": rollout.id,
                "attempt": rollout.attempt,
                "value": reward.value,
                "scope": reward.scope,
                "source": reward.source,
                "detail": dict(reward.detail),
                "created_at": tx.now,
            }
            if not tx.insert_new(rewards, values):
                raise LedgerError(f"reward {id} is on record for another rollout; use a new id", param="id")
            tx.note("reward", rollout.id, group_id=group.id, scope=reward.scope, value=reward.value)
            settle(tx, group, self._uow.settings)
            return Reward(
                id, rollout.id, reward.value, reward.scope, reward.source, dict(reward.detail), created_at=tx.now
            )

        return await self._uow.transact(work)

    async def of(self, rollout_id: str) -> Sequence[Reward]:
        """Every reward ever appended to the rollout, also of earlier attempts, in order."""
        statement = sa.select(rewards).where(rewards.c.rollout_id == rollout_id)
        ordered = statement.order_by(rewards.c.created_at, rewards.c.id)
        return await self._uow.query(lambda tx: [reward_of(row) for row in tx.all(ordered)])


def _check_same(known: Any, reward: NewReward) -> None:
    if (known.rollout_id, known.value, known.scope) != (reward.rollout_id, reward.value, reward.scope):
        raise LedgerError(f"reward {known.id} is on record with another value or scope; use a new id", param="id")
