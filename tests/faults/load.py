"""Load for the fault tests: clients that make calls without a pause and remember what they were told."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rolltap.calllog.facts import CallLog
from rolltap.errors import StoreUnavailable
from rolltap.types import Outcome, Session

from ..unit.calllog.facts import a_completion, an_intent

DRAINED_WITHIN_S = 10.0


class Load:
    """Clients that make calls without a pause; each knows what it was told."""

    def __init__(self, log: CallLog, session: Session) -> None:
        self._log = log
        self._session = session
        self.acknowledged: list[str] = []
        self.refused = 0
        self._stop = False
        self._clients: list[asyncio.Task[None]] = []

    def start(self, clients: int) -> None:
        self._clients = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        while not self._stop:
            intent = an_intent(self._session)
            try:
                await self._log.append_intent(intent)
                await self._log.append_completion(a_completion(intent.id))
            except StoreUnavailable:
                self.refused += 1
                await asyncio.sleep(0.01)
                continue
            self.acknowledged.append(intent.id)

    async def reach(self, count: int) -> None:
        """Waits until `count` more calls are acknowledged."""
        goal = len(self.acknowledged) + count
        while len(self.acknowledged) < goal:
            for client in self._clients:
                if client.done():
                    client.result()
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        self._stop = True
        await asyncio.gather(*self._clients)

    async def check(self) -> None:
        """Everything that was acknowledged is in the log, whole."""
        rows = {row.intent.id: row for row in await self._log.rows(self._session.id)}
        lost = [call_id for call_id in self.acknowledged if call_id not in rows]
        assert not lost
        assert all(rows[call_id].call().outcome is Outcome.COMPLETED for call_id in self.acknowledged)


async def emptied(log: Any) -> float:
    """How many seconds the spool took to be drained."""
    start = time.monotonic()
    while log.waiting:  # noqa: ASYNC110 - the log's own task empties it
        await asyncio.sleep(0.01)
    return time.monotonic() - start
