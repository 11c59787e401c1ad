"""A whole rolltap whose record is read: calls over HTTP, a scripted engine, a reader of the server's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rolltap.engine.scripted import say
from rolltap.reading.reader import RecordReader

from ...harnesses.house import House, house

TURN = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = {"role": "system", "content": "You are an agent."}
QUESTION = {"role": "user", "content": "Which files hold a zebra?"}


@dataclass
class Talk:
    """A session whose client sends what it is told."""

    session_id: str
    key: str
    url: str
    http: aiohttp.ClientSession

    async def ask(self, *messages: dict[str, Any], tools: bool = True) -> dict[str, Any]:
        """The assistant's message."""
        body = {"model": "tiny", "messages": list(messages)} | ({"tools": TOOLS} if tools else {})
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer["choices"][0]["message"]

    async def two_turns(self) -> list[dict[str, Any]]:
        """A question, a tool call with its result, an answer; the whole conversation."""
        history: list[dict[str, Any]] = [SYSTEM, QUESTION]
        history.append(await self.ask(*history))
        call_id = history[-1]["tool_calls"][0]["id"]
        history.append({"role": "tool", "tool_call_id": call_id, "content": "stripes.txt"})
        history.append(await self.ask(*history))
        return history


@dataclass
class ReadHouse:
    home: House
    http: aiohttp.ClientSession

    @property
    def reader(self) -> RecordReader:
        return self.home.reader

    async def talk(self, **tags: str) -> Talk:
        opened = await self.home.client.open_session(policy="tiny", tags=tags)
        return Talk(opened.session_id, opened.endpoint.key, self.home.urls["agent"], self.http)


@asynccontextmanager
async def read_house(folder: Path) -> AsyncIterator[ReadHouse]:
    script = say(TURN, "The file stripes.txt holds a zebra.")
    async with house(script, folder, top_logprobs=0) as home, aiohttp.ClientSession() as http:
        yield ReadHouse(home, http)


@pytest.fixture
async def reading(tmp_path: Path) -> AsyncIterator[ReadHouse]:
    """Of this test's own: it is the only one with sessions in it."""
    async with read_house(tmp_path) as reading:
        yield reading


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def read_by_all(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ReadHouse]:
    """The module's, whose other tests have left sessions in it."""
    async with read_house(tmp_path_factory.mktemp("read")) as reading:
        yield reading
