"""The ledger's events, in order. They are in a table, so every process sees the events of all processes.

Postgres assigns `seq` before a transaction commits, so a lower number may appear after a higher one. A reader reads the
last `OVERLAP` seconds again and yields the events that it has not seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import sqlalchemy as sa

from rolltap.ledger.base import Event
from rolltap.ledger.schema import events
from rolltap.ledger.unit_of_work import BULK_WITHIN_S, Tx, UnitOfWork, wait_for

OVERLAP = 5.0
PAGE = 500


class Events:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def since(self, seq: int, limit: int = PAGE) -> Sequence[Event]:
        """The first `limit` events after `seq`."""
        return await self._uow.query(lambda tx: _page(tx, seq, limit))

    async def last(self) -> int:
        """The greatest `seq` so far; 0 if there are no events."""
        return await self._uow.query(lambda tx: tx.scalar(sa.select(sa.func.max(events.c.seq))) or 0)

    async def follow(self, seq: int) -> AsyncIterator[Event]:
        """Yields the events after `seq`, then new ones as they occur."""
        seen: dict[int, float] = {}
        while True:
            ticket = self._uow.changed.ticket()
            now = await self._uow.query(lambda tx: tx.now)
            read_to = seq
            while page := await self.since(read_to):
                read_to = page[-1].seq
                for event in page:
                    if event.seq not in seen:
                        seen[event.seq] = event.at
                        yield event
            seq = max((known for known, at in seen.items() if at <= now - OVERLAP), default=seq)
            seen = {known: at for known, at in seen.items() if known > seq}
            await wait_for(ticket, self._uow.settings.poll)

    async def forget(self) -> int:
        """Deletes events older than the setting `event_memory`; returns their number."""
        memory = self._uow.settings.event_memory
        old = sa.delete(events)
        return await self._uow.transact(
            lambda tx: tx.run(old.where(events.c.at < tx.now - memory)), within_s=BULK_WITHIN_S
        )


def _page(tx: Tx, seq: int, limit: int) -> list[Event]:
    statement = sa.select(events).where(events.c.seq > seq).order_by(events.c.seq).limit(limit)
    return [Event(row.seq, row.at, row.kind, row.subject, row.data) for row in tx.all(statement)]
