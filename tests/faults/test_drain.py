"""SIGTERM under replies that take long: they end whole, or are cut and on record; nothing stays open."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ..integration.service import Service, end, service

SCRIPT = 'otherwise = { say = "one two three four five six seven eight nine ten", token_delay_s = %g }\n'


@dataclass
class Reply:
    """What the client of one streamed call saw."""

    begun: asyncio.Event
    text: str = ""

    @property
    def whole(self) -> bool:
        return "[DONE]" in self.text


@asynccontextmanager
async def in_mid_stream(folder: Path, token_s: float, limits: str) -> AsyncIterator[tuple[Service, Reply, Any]]:
    """A server with a stream under way, its client's task, and what that has read."""
    script = folder / "script.toml"
    script.write_text(SCRIPT % token_s)
    async with service(folder, script, settings=f"[limits]\n{limits}\n") as running, aiohttp.ClientSession() as http:
        async with running.client() as client:
            session = await client.open_session(ttl=300)
        reply = Reply(asyncio.Event())

        async def read() -> None:
            url, key = session.endpoint.base_url, session.endpoint.key
            body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "count"}]}
            async with http.post(
                f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
            ) as answer:
                async for line in answer.content:
                    reply.text += line.decode()
                    if "content" in reply.text:
                        reply.begun.set()

        reading = asyncio.create_task(read())
        async with asyncio.timeout(15):
            await reply.begun.wait()
        yield running, reply, reading


async def readiness(running: Service) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.get(f"{running.admin_url}/ready") as answer:
        return answer.status, (await answer.json())["status"]


def completions(folder: Path) -> list[tuple[str, int]]:
    """Of each intent on record: its outcome, and the size of what was sampled."""
    with closing(sqlite3.connect(folder / "data" / "rolltap.db")) as database, database:
        return database.execute(
            "SELECT c.outcome, length(c.output_ids) "
            "FROM call_intents i LEFT JOIN call_completions c ON c.call_id = i.id"
        ).fetchall()


async def test_a_long_reply_ends_whole_while_the_server_says_that_it_stops(tmp_path: Path) -> None:
    async with in_mid_stream(tmp_path, 0.3, "drain_s = 60\nunready_s = 0.2") as (running, reply, reading):
        running.server.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while await readiness(running) != (503, "stopping"):  # noqa: ASYNC110  the event is another process's
                await asyncio.sleep(0.02)
        assert not reply.whole
        await asyncio.wait_for(reading, 30)
        assert reply.whole
        assert await end(running.server, signal.SIGTERM) == 0
    ((outcome, _),) = completions(tmp_path)
    assert outcome == "completed"


@pytest.mark.parametrize("again", [False, True], ids=["drain_s is over", "a second signal"])
async def test_a_reply_that_is_cut_is_on_record_with_what_was_sampled(tmp_path: Path, again: bool) -> None:
    limits = f"drain_s = {60 if again else 0.5}\nunready_s = 0.1"
    async with in_mid_stream(tmp_path, 5, limits) as (running, reply, reading):
        running.server.send_signal(signal.SIGTERM)
        if again:
            await asyncio.sleep(1.2)  # within a second it is the same signal
            running.server.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(asyncio.to_thread(running.server.wait), 20) == 0
        with pytest.raises(aiohttp.ClientPayloadError):
            await reading
        assert not reply.whole
    ((outcome, sampled),) = completions(tmp_path)
    assert outcome == "aborted"
    assert sampled > 0
    said = (tmp_path / "serve.log").read_text()
    assert "Traceback" not in said
    assert "calls cut by the stop, recorded as aborted: 1" in said
