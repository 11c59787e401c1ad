"""The checks of the fault suite themselves: what is late is waited for, what is lost is a violation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rolltap.ledger.schema  # noqa: F401  declares the ledger's tables on the same metadata
from rolltap.calllog.codec import EncodedFact
from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallRow
from rolltap.calllog.schema import call_intents
from rolltap.calllog.sql import SqlCallLog
from rolltap.calllog.writing import GroupWriter

from ..unit.calllog.facts import a_session, an_intent
from . import invariants
from .clients import Told


class HeldWriter:
    """Acknowledges intents at once and writes them when it is let go, as the spool and the ingest stream do."""

    waiting = 0
    unseen = 0
    blind = False
    refused = 0
    spool = None

    def __init__(self, store: GroupWriter) -> None:
        self._store = store
        self._intents: list[EncodedFact] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def settled(self) -> None: ...

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        self._intents += [fact for fact in facts if fact.table is call_intents]
        await self._store.write([fact for fact in facts if fact.table is not call_intents])

    async def let_go(self) -> None:
        await self._store.write(self._intents)


async def test_an_intent_that_is_durable_outside_the_store_is_waited_for_and_a_lost_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, writers = f"sqlite:///{tmp_path}/log.db", []

    def wrap(store: GroupWriter) -> GroupWriter:
        writers.append(HeldWriter(store))
        return writers[0]

    log = SqlCallLog(Database(url), wrap=wrap)
    await log.start()
    session = a_session()
    intent = an_intent(session)
    await log.open_session(session)
    await log.append_intent(intent)
    asked: dict[str, Any] = {"id": intent.id, "session": session.id, "prompt_ids": [1, 2, 3], "output_ids": []}
    with monkeypatch.context() as patched:
        patched.setattr(invariants, "RECOVERS_WITHIN_S", 0.0)
        with pytest.raises(AssertionError, match=f"I4: the engine was asked for {intent.id}, which has no intent"):
            await invariants.check(url, Told(sessions=[session.id]), [asked])
    looked, read = asyncio.Event(), SqlCallLog.rows

    async def rows(self: SqlCallLog, session_id: str) -> Sequence[CallRow]:
        found = await read(self, session_id)
        looked.set()
        return found

    monkeypatch.setattr(SqlCallLog, "rows", rows)
    check = asyncio.create_task(invariants.check(url, Told(sessions=[session.id]), [asked]))
    await looked.wait()
    await writers[0].let_go()
    await check
    await log.close()
