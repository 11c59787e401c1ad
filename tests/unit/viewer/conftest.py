"""A whole rolltap with its viewer: calls over HTTP, a scripted engine, a browser's cookie."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from rolltap.engine.scripted import say

from ...harnesses.house import house
from ..reading.conftest import TURN, ReadHouse

HOSTILE = (
    '<script>window.broken = 1</script><img src=x onerror="window.broken = 1">"\'></title></textarea></script>'
    "<!--\x1b[2J\u202egnp.exe\u200b{{ 7 * 7 }}&lt;"
)
"""Markup, a terminal's escape, a character that turns the reading direction, and one that can't be seen."""


@dataclass
class Viewed:
    """A rolltap and a browser that was let in."""

    reading: ReadHouse
    browser: aiohttp.ClientSession
    admin: str

    async def get(self, path: str, status: int = 200) -> str:
        async with self.browser.get(f"{self.admin}/view{path}") as response:
            text = await response.text()
            assert response.status == status, text[-2000:]
            return text


@asynccontextmanager
async def viewing(folder: Path) -> AsyncIterator[Viewed]:
    script = say(TURN, f"The file stripes.txt holds a zebra. {HOSTILE}")
    async with house(script, folder, top_logprobs=3) as home, aiohttp.ClientSession() as http:
        jar = aiohttp.CookieJar(unsafe=True)  # which takes cookies of an address without a name
        async with aiohttp.ClientSession(cookie_jar=jar) as browser:
            token = home.app.view_access.new_link()
            async with browser.get(f"{home.urls['admin']}/view/open?token={token}") as response:
                assert response.status == 200
            yield Viewed(ReadHouse(home, http), browser, home.urls["admin"])


@pytest.fixture
async def viewed(tmp_path: Path) -> AsyncIterator[Viewed]:
    """Of this test's own."""
    async with viewing(tmp_path) as viewed:
        yield viewed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def viewed_by_all(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Viewed]:
    """The module's, whose other tests have left sessions in it."""
    async with viewing(tmp_path_factory.mktemp("viewed")) as viewed:
        yield viewed
