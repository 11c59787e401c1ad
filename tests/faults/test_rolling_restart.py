"""Proxies behind nginx that are restarted in turn: no reply is cut, no conversation breaks, all is on record once."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from rolltap.calllog.facts import CallRow
from rolltap.calllog.sql import open_call_log
from rolltap.types import Outcome

from .clients import Clients, Messages, Reply, turn
from .invariants import check
from .nginx import nginx
from .processes import EngineProcess, Forker, Proxy

PROXIES = 4
CONVERSATIONS = 200
TOKEN_S = 0.6
REPLY = "this takes long"
"""A dozen tokens with the turn's number before it: a reply of about 8 s."""

DRAIN_S = 60
SDK_RETRIES = 2
SETTINGS = {
    "limits": {"drain_s": DRAIN_S, "unready_s": 0.5, "calls_at_once": CONVERSATIONS},
    "engines.main": {"first_byte_s": 30.0, "idle_s": 30.0},
}


@dataclass(eq=False)
class Front:
    """nginx before the proxies, as `Clients` see a proxy."""

    urls: dict[str, str]
    proxies: Sequence[Proxy]

    def tail(self, size: int = 2000) -> str:
        return "\n".join(proxy.tail(size) for proxy in self.proxies)


@dataclass(eq=False)
class Agents:
    """Conversations that ask as SDKs do: twice more after a refusal, never after a reply has begun."""

    clients: Clients
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    refused: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    cut: list[Reply] = field(default_factory=list)
    longest_s: float = 0.0

    async def converse(self, number: int) -> int:
        """Turns that were answered whole, until one that began after `stop`; it ends early where it was broken."""
        key = await self.clients.open_session()
        messages: Messages = []
        await asyncio.sleep(random.Random(number).uniform(0, 5))
        turns = 0
        while True:
            is_last = self.stop.is_set()
            messages.append(turn(f"turn {turns} of {number}", say=f"{turns} {REPLY}", token_delay_s=TOKEN_S))
            reply = await self._ask(key, messages)
            assert reply.ended, (number, turns, reply)
            messages.append({"role": "assistant", "content": reply.text})
            turns += 1
            if is_last:
                return turns

    async def _ask(self, key: str, messages: Messages) -> Reply:
        reply = Reply()
        for attempt in range(1 + SDK_RETRIES):
            began = time.monotonic()
            marked = {"x-stainless-retry-count": str(attempt)}
            reply = await self.clients.ask(key, messages, headers=marked, timeout=DRAIN_S)
            if reply.ended:
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                return reply
            if reply.status == 200:
                self.cut.append(reply)
                return reply
            self.refused[reply.status, reply.body[:200]] += 1
            await asyncio.sleep(0.5 * 2**attempt)
        return reply


async def restart(proxy: Proxy) -> float:
    """SIGTERM, then a new process once the old one has ended; returns how long its calls kept that one."""
    began = time.monotonic()
    await proxy.stop(within=DRAIN_S)
    drained_s = time.monotonic() - began
    assert await proxy.start(), proxy.tail()
    return drained_s


@pytest.mark.timeout(300)
async def test_no_reply_is_cut_while_four_proxies_are_restarted_in_turn(postgres_url: str, tmp_path: Path) -> None:
    """Replies of 8 s stand for those of minutes: both are longer than a restart (about a second) and shorter than
    `drain_s` (60 s here, 15 minutes by default), so every SIGTERM finds all of a proxy's calls under way.

    Takes over 10 CPU seconds: 200 conversations and nine processes pass 20,000 tokens on, one by one.
    """
    async with AsyncExitStack() as stack:
        forker, engine = await asyncio.to_thread(lambda: (Forker(), EngineProcess()))
        stack.callback(forker.close)
        stack.callback(engine.close)
        proxies: list[Proxy] = []
        for number in range(PROXIES):
            folder = tmp_path / f"proxy-{number}"
            folder.mkdir()
            proxies.append(Proxy(folder, forker, engine.url, {"url": postgres_url, "connections": 20}, SETTINGS))
            stack.push_async_callback(proxies[-1].kill)
        for proxy in proxies:
            assert await proxy.start(), proxy.tail()
        front = await stack.enter_async_context(
            nginx(tmp_path, [urlsplit(proxy.urls["agent"]).port or 0 for proxy in proxies], kept=64)
        )
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        urls = {"agent": front, "admin": proxies[0].urls["admin"]}
        agents = Agents(Clients(Front(urls, proxies), http))  # type: ignore[arg-type]
        conversations = [asyncio.create_task(agents.converse(number)) for number in range(CONVERSATIONS)]
        await until_all_are_under_way(agents)
        drained = [await restart(proxy) for proxy in proxies]
        agents.stop.set()
        turns = await asyncio.gather(*conversations)
        print(
            f"{sum(turns)} replies, the longest {agents.longest_s:.1f} s; drains: {drained}; retries: {agents.refused}"
        )
        assert agents.cut == []
        assert min(drained) > TOKEN_S  # each had replies under way
        async with http.get(f"{engine.url}/scripted/log") as answer:
            journal = (await answer.json())["requests"]
        for proxy in proxies:
            await proxy.stop()
        await check(postgres_url, agents.clients.told, journal)
        assert len(agents.clients.told.calls) == sum(turns)
        sampled = [entry["outcome"] for entry in journal if entry["session"] in agents.clients.told.sessions]
        assert sampled == ["finished"] * sum(turns)
        for proxy in proxies:
            assert "Traceback" not in proxy.tail(sys.maxsize)
    await check_record(postgres_url, agents.clients.told.sessions, sum(turns))


async def until_all_are_under_way(agents: Agents) -> None:
    """Every conversation has had its first reply."""
    async with asyncio.timeout(60):
        while len(agents.clients.told.calls) < CONVERSATIONS:  # noqa: ASYNC110  the event is another process's
            await asyncio.sleep(0.1)


async def check_record(url: str, sessions: Sequence[str], calls: int) -> None:
    """Of each session: its calls are complete, and each goes on from the one before it."""
    log = open_call_log(url, writable=False)
    await log.start()
    rows: list[CallRow] = []
    for session in sessions:
        of_session = await log.rows(session)
        assert [row.intent.break_ for row in of_session] == [None] * len(of_session)
        rows += of_session
    await log.close()
    assert len(rows) == calls
    assert {row.completion.outcome for row in rows if row.completion is not None} == {Outcome.COMPLETED}
    assert all(row.completion is not None for row in rows)
