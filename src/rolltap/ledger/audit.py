"""The audit log: an append-only log of changes to sessions, policies, tasks and keys.

An entry with the id of the key is written before the change. Rewards, claims and attempts have the key's id in their
own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.ledger.schema import audit
from rolltap.ledger.unit_of_work import Tx, UnitOfWork


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """`at` is in seconds since the epoch by the database's clock; `action` is a route, or a command's name."""

    seq: int
    at: float
    key_id: str
    role: str
    action: str
    detail: Mapping[str, Any]


class Audit:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def append(self, key_id: str, role: str, action: str, detail: Mapping[str, Any]) -> None:
        await self._uow.transact(lambda tx: append(tx.connection, tx.now, key_id, role, action, detail))

    async def newest(self, *, key_id: str | None = None, before: int | None = None, limit: int) -> Sequence[AuditEntry]:
        """A page of entries, the newest first, of one key if given. `before`: the last `seq` of the previous page."""
        statement = sa.select(audit).order_by(audit.c.seq.desc()).limit(limit)
        if key_id is not None:
            statement = statement.where(audit.c.key_id == key_id)
        if before is not None:
            statement = statement.where(audit.c.seq < before)
        return await self._uow.query(lambda tx: _entries(tx, statement))


def append(
    connection: sa.Connection, at: float, key_id: str, role: str, action: str, detail: Mapping[str, Any]
) -> None:
    """Appends an entry in the current transaction."""
    values = {"at": at, "key_id": key_id, "role": role, "action": action, "detail": dict(detail)}
    connection.execute(audit.insert().values(values))


def _entries(tx: Tx, statement: sa.Select[Any]) -> list[AuditEntry]:
    return [AuditEntry(row.seq, row.at, row.key_id, row.role, row.action, row.detail) for row in tx.all(statement)]
