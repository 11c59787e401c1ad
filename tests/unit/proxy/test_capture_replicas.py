"""Proxies on one Postgres meet the first calls of a conversation that its harness names, all at the same instant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from rolltap.calllog.facts import CallLog
from rolltap.calllog.sql import open_call_log
from rolltap.settings import LimitSettings
from rolltap.tokenizer import HubTokenizer
from rolltap.types import Outcome, Session
from tests.unit.proxy.conftest import Client, ToldEngine, serve

PROXIES = 3
NAMED = {"x-session-id": "a-conversation"}


def together(look: Callable[[str], Awaitable[Session | None]], everyone: asyncio.Barrier) -> Any:
    """`look`, whose first answer waits until every proxy has looked: none has seen a session of the others."""
    waiting = True

    async def first_together(key_hash: str) -> Session | None:
        nonlocal waiting
        found = await look(key_hash)
        if waiting:
            waiting = False
            await everyone.wait()
        return found

    return first_together


@pytest.fixture(params=["postgres", "redis"])
def ingest(request: pytest.FixtureRequest) -> str | None:
    return request.getfixturevalue("redis_url") if request.param == "redis" else None


@pytest.fixture
async def logs(
    postgres_url: str, ingest: str | None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sequence[CallLog]]:
    opened = [open_call_log(postgres_url, ingest=ingest) for _ in range(PROXIES)]
    await asyncio.gather(*(log.start() for log in opened))
    everyone = asyncio.Barrier(PROXIES)
    for log in opened:
        monkeypatch.setattr(log, "session_by_key", together(log.session_by_key, everyone))
    yield opened
    await asyncio.gather(*(log.close() for log in opened))


async def test_all_take_part_in_one_session(
    logs: Sequence[CallLog], tokenizer: HubTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    none = Session("none", "tiny", "none", 0.0, 0.0)
    planes = [serve(log, ToldEngine(tokenizer), none, LimitSettings()) for log in logs]  # type: ignore[arg-type]

    async def call(client: Client, text: str) -> int:
        message = {"role": "user", "content": text}
        return (await client.chat(message, key="project-key", headers=NAMED)).status

    statuses = await asyncio.gather(*(call(plane.client, f"call {at}") for at, plane in enumerate(planes)))
    assert statuses == [200] * PROXIES
    assert await call(planes[-1].client, "one more") == 200
    (session,) = await logs[0].sessions()
    ends = [row.call().outcome for row in await logs[0].rows(session.id)]
    assert ends == [Outcome.COMPLETED] * (PROXIES + 1)
    assert "refused" not in caplog.text
