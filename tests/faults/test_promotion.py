"""An asynchronous standby is promoted that lacks acknowledged calls: the proxy that has them writes them again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from rolltap.calllog import writing
from rolltap.calllog.facts import CallLog, RequestParts
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.types import Outcome, Session

from ..conftest import PostgresServer
from ..unit.calllog.facts import a_session, append
from .relay import relayed

TOOLS = RequestParts(b'{"model":"m"}', (b'{"role":"user"}',), 0, {"tools": b"[" + b"1," * 10_000 + b"1]"})
BACK_WITHIN_S = 30.0


async def written_again(log: SqlCallLog, facts: int) -> None:
    async with asyncio.timeout(BACK_WITHIN_S):
        while log.written_again < facts:  # noqa: ASYNC110  the heartbeat's own task does it
            await asyncio.sleep(0.05)


async def whole(log: CallLog, session: Session, calls: set[str]) -> None:
    rows = await log.rows(session.id)
    assert {row.intent.id for row in rows if row.call().outcome is Outcome.COMPLETED} == calls
    for call in calls:
        assert (await log.request(call)).fixed == TOOLS.fixed


@pytest.mark.parametrize("held", ["all", "not all"])
async def test_what_a_promoted_standby_lacks_is_written_again_and_what_is_not_held_is_said(
    held: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes about 5 CPU seconds: two clusters."""
    primary, standby = [await asyncio.to_thread(PostgresServer, durable=False) for _ in range(2)]
    await asyncio.to_thread(primary.start)
    try:
        async with relayed("127.0.0.1", primary.port) as address:
            url = f"postgresql://rolltap@127.0.0.1:{address.own_port}/postgres"
            log = open_call_log(url, spools=[tmp_path / "spool"])
            await log.start()
            session = a_session()
            await log.open_session(session)
            calls = {(await append(log, session)).id}
            kept = {(await append(log, session, request=TOOLS)).id for _ in range(3)} if held == "all" else set()
            await asyncio.to_thread(standby.follow, primary)  # from here on it gets nothing
            if held == "not all":
                monkeypatch.setattr(writing, "RECENT_BYTES", 1)
            later = a_session()
            await log.open_session(later)
            first, *others = [(await append(log, later, request=TOOLS)).id for _ in range(10)]
            await asyncio.to_thread(primary.stop, "immediate")
            await asyncio.to_thread(standby.start)
            await asyncio.to_thread(standby.promote)
            address.port = standby.port
            with caplog.at_level(logging.ERROR, "rolltap.store"):
                await written_again(log, 21 if held == "all" else 1)
            (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
            assert ("older ones may be lost" in said) == (held == "not all")
            if held == "all":
                assert "21 acknowledged facts" in said
                assert log.written_again == 21
                await whole(log, later, {first, *others})
                after = (await append(log, later, request=TOOLS, parent_id=first, shared=5)).id
                await whole(log, later, {first, *others, after})
                assert {row.intent.id for row in await log.rows(session.id)} == calls | kept
            await log.close()
    finally:
        for server in (primary, standby):
            await asyncio.to_thread(server.remove)
