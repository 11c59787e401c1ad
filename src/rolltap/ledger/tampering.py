"""Acts of tampering by session. Each act is a row; a rollout gets the counts of its session when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from rolltap.ledger.reading import tampering_counts
from rolltap.ledger.schema import tampering
from rolltap.ledger.unit_of_work import Tx, UnitOfWork
from rolltap.tampering import TamperingAct, TamperingKind, count_by_kind


class Tampering:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def append(self, session_id: str, act: TamperingAct) -> None:
        await self._uow.transact(lambda tx: append(tx, session_id, [act]))

    async def of(self, session_id: str) -> Sequence[TamperingAct]:
        """A session's acts, in order."""
        return await self._uow.query(lambda tx: acts_of(tx, session_id))

    async def counts(self, session_ids: Sequence[str]) -> dict[str, int]:
        """The number of acts by session. Sessions without any are left out."""
        return await self._uow.query(lambda tx: tampering_counts(tx.connection, session_ids))


def append(tx: Tx, session_id: str, acts: Iterable[TamperingAct]) -> None:
    rows = [{"at": tx.now, "session_id": session_id, "kind": each.kind.value, "detail": each.detail} for each in acts]
    tx.run(tampering.insert(), rows)


def acts_of(tx: Tx, session_id: str) -> list[TamperingAct]:
    mine = sa.select(tampering).where(tampering.c.session_id == session_id).order_by(tampering.c.seq)
    return [TamperingAct(TamperingKind(row.kind), row.detail) for row in tx.all(mine)]


def counted(tx: Tx, session_id: str | None) -> dict[str, int]:
    """The number of a session's acts by kind."""
    return count_by_kind(acts_of(tx, session_id)) if session_id else {}
