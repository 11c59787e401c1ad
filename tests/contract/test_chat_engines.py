"""What every client of a chat upstream promises, those of other packages too."""

from __future__ import annotations

import pytest

from rolltap.engine.scripted import Fault, ScriptedEngine, ScriptedReply, ToolUse, logprob_of, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineProtocolError, EngineRefused, EngineUnavailable
from rolltap.extras import known_names
from rolltap.protocols.conversation import ChatRequest, Message, Sampling, Text
from rolltap.proxy.engines.base import ChatCall, ChatChunk, ChatEngine
from rolltap.proxy.engines.registry import CHAT_ENGINES, CHAT_ENTRY_POINTS, open_chat_engine
from rolltap.settings import EngineSettings

from .engine_world import collect

KINDS = known_names(CHAT_ENGINES, CHAT_ENTRY_POINTS)
REPLY = ScriptedReply(
    think="hm", say="look", call=(ToolUse("bash", {"command": "ls"}), ToolUse("bash", {"command": "pwd"}))
)


def client(kind: str, server: ScriptedEngine) -> ChatEngine:
    return open_chat_engine("up", EngineSettings.model_validate({"kind": kind, "url": server.url}))


async def ask(engine: ChatEngine) -> list[ChatChunk]:
    chat = ChatRequest("test", "m", (Message("user", (Text("hello"),)),), ())
    return await collect(engine.chat, ChatCall("call", "scripted", chat, Sampling(max_tokens=200), session_id="s"))


def tool_calls(chunks: list[ChatChunk]) -> dict[int, tuple[str, str]]:
    """Name and arguments of each call, by its position."""
    calls: dict[int, tuple[str, str]] = {}
    for piece in [piece for chunk in chunks for piece in chunk.tool_calls]:
        name, arguments = calls.get(piece.position, ("", ""))
        calls[piece.position] = (name + piece.name, arguments + piece.arguments)
    return calls


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_reply_and_its_tokens(kind: str, wire: str):
    async with ScriptedEngine(say(REPLY), FOLDER, wire=wire) as server:
        chunks = await ask(client(kind, server))
        (entry, *_) = [entry for entry in server.journal.entries if entry.output]
    assert "".join(chunk.reasoning for chunk in chunks) == "hm"
    assert "".join(chunk.text for chunk in chunks) == "look"
    assert tool_calls(chunks) == {0: ("bash", '{"command": "ls"}'), 1: ("bash", '{"command": "pwd"}')}
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == entry.output
    assert [value for chunk in chunks for value in chunk.logprobs or ()] == [
        logprob_of(token, at) for at, token in enumerate(ids)
    ]
    assert [chunk.prompt_ids for chunk in chunks if chunk.prompt_ids] == [entry.prompt_ids]
    last = chunks[-1]
    assert (last.finish, last.complete) == ("tool_calls", True)
    assert last.usage is not None
    assert (last.usage.prompt, last.usage.output) == (len(entry.prompt_ids), len(ids))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_upstream_without_ids_is_text_only(kind: str):
    async with ScriptedEngine(say(REPLY), FOLDER, wire="openai") as server:
        engine = client(kind, server)
        facts = await engine.probe()
        chunks = await ask(engine)
    assert "".join(chunk.text for chunk in chunks) == "look"
    assert all(not chunk.token_ids for chunk in chunks)
    assert not chunks[-1].complete
    assert "can't be trained" in facts.notes[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(kind="cut", after=2, times=0), EngineUnavailable),
        (Fault(kind="unfinished", after=2, times=0), EngineProtocolError),
        (Fault(kind="garbage", after=2, times=0), EngineProtocolError),
        (Fault(kind="status", status=400, times=0), EngineRefused),
    ],
)
async def test_broken_replies_are_no_answers(kind: str, fault: Fault, error: type[Exception]):
    async with ScriptedEngine(say(ScriptedReply(say="hello", fault=fault)), FOLDER) as server:
        with pytest.raises(error):
            await ask(client(kind, server))
