"""Every client holds the same conversation through the real proxy, and its tokens are one unbroken line."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rolltap.engine.scripted import Rule, Script, ToolUse, Turn

from ..harnesses.house import Run, house
from .framework_conversations import LangChainAnthropic, LangChainChat, LangChainResponses, LiteLLM, LiteLLMAnthropic
from .sdk_conversations import TOOL, Anthropic, Conversation, Gemini, OpenAIChat, OpenAIResponses, OpenAIResponsesById

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
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # LiteLLM leaves connections open
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince211"),  # LiteLLM's streams
]
every_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def look(place: str) -> ToolUse:
    return ToolUse(TOOL, {"place": place})


TALK = Script(
    rules=(
        Rule(
            turns=(
                Turn(think="Two places, so two looks.", say="I look at both.", call=(look("shed"), look("pond"))),
                Turn(think="One is left.", call=(look("roof"),), split="odd"),
                Turn(think="That was all.", say="A frog.\nNothing else."),
                Turn(say="Goodbye."),
            )
        ),
    )
)


@every_client
@streamed_or_not
async def test_a_conversation_is_one_unbroken_line(client: type[Conversation], stream: bool, tmp_path: Path) -> None:
    async with house(TALK, tmp_path, history_thinking="keep") as home, AsyncExitStack() as closing:
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
