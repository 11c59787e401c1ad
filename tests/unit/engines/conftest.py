"""A small real tokenizer in a folder, and the process's connection pool."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from rolltap.engine.scripted.writing import ScriptedReplyWriter, ScriptTokenizer
from rolltap.engine.tiny import FOLDER


@pytest.fixture(scope="session")
def writer() -> ScriptedReplyWriter:
    return ScriptedReplyWriter(ScriptTokenizer(FOLDER))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield session
