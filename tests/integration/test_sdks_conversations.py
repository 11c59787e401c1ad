"""Every client holds the same conversation through the real proxy, and its tokens are one unbroken line."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from rolltap.engine.scripted import Script

from ..harnesses.house import House, Run, house
from .framework_conversations import LangChainAnthropic, LangChainChat, LangChainResponses, LiteLLM, LiteLLMAnthropic
from .sdk_conversations import Anthropic, Conversation, Gemini, OpenAIChat, OpenAIResponses, OpenAIResponsesById
from .talk import TALK

CLIENTS = [
    OpenAIChat,
    OpenAIResponses,
    OpenAIResponsesById,
    Anthropic,
    Gemini,
    LiteLLM,
    LiteLLMAnthropic,
    LangChainChat,
    LangChainResponses,
    LangChainAnthropic,
]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # LiteLLM leaves connections open
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince211"),  # LiteLLM's streams
]
every_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@asynccontextmanager
async def shared_house(script: Script, folders: pytest.TempPathFactory, **policy: Any) -> AsyncIterator[House]:
    """One for a whole module: every test has sessions of its own."""
    async with house(script, folders.mktemp("house"), **policy) as home:
        yield home
        gc.collect()  # LiteLLM leaves connections to the garbage collector: let that be now


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with shared_house(TALK, tmp_path_factory, history_thinking="keep") as home:
        yield home


@every_client
@streamed_or_not
async def test_a_conversation_is_one_unbroken_line(client: type[Conversation], stream: bool, home: House) -> None:
    async with AsyncExitStack() as closing:
        session = await home.open()
        talk = client(session.endpoint, closing, stream=stream)
        said = [await talk.say("Where is the frog?")]
        assert [use.arguments for use in said[0].uses] == [{"place": "shed"}, {"place": "pond"}]
        said.append(await talk.answer("tools", "water"))
        assert [use.arguments for use in said[1].uses] == [{"place": "roof"}]
        said.append(await talk.answer("a frog"))
        said.append(await talk.say("Thank you."))
        assert [reply.text for reply in said] == ["I look at both.", "", "A frog.\nNothing else.", "Goodbye."]
        if client.shows_reasoning:
            assert [reply.reasoning.strip() for reply in said[:3]] == [
                "Two places, so two looks.",
                "One is left.",
                "That was all.",
            ]
        run = await home.read(Run(session))
        entries = run.asked
        assert [entry.extends for entry in entries] == [None, True, True, True]
        rows = await home.app.call_log.rows(session.session_id)
        assert [row.intent.break_ for row in rows] == [None] * 4
        for reply, entry, row in zip(said, entries, rows, strict=True):
            assert row.prompt_ids.tolist() == entry.prompt_ids
            assert (reply.prompt, reply.output) == (len(entry.prompt_ids), len(entry.output))
            assert reply.cached == row.intent.shared
        assert run.report["segments"] == 1
