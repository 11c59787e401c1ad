"""Chat mode end to end: an OpenAI-compatible chat server behind the real proxy, listened to."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from rolltap.engine.scripted import Fault, Prompt, ScriptedEngine, ScriptedReply, ToolUse, logprob_of, say
from rolltap.engine.tiny import FOLDER
from rolltap.ids import new_id
from rolltap.protocols.conversation import ChatRequest
from rolltap.protocols.handles import MAX_CALLS, Handles
from rolltap.proxy.app import Rolltap
from rolltap.proxy.call.sources.chat import ChatReplyParser
from rolltap.proxy.engines.base import ChatChunk, ToolDelta
from rolltap.proxy.server import bind, serve
from rolltap.settings import DATABASE, Settings
from rolltap.types import Flaw, Outcome

BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
USER = {"role": "user", "content": "count the files"}
LOOK = ScriptedReply(think="hm", say="I look.", call=(ToolUse("bash", {"command": "ls | wc -l"}),))


@asynccontextmanager
async def chat_mode_proxy(folder: Path, engine: ScriptedEngine, **policy: Any) -> AsyncIterator[tuple[Rolltap, str]]:
    """The real proxy over `engine`, on a port of its own, as `serve --capture --kind openai_compatible` runs it."""
    settings = Settings.model_validate(
        {
            "data": folder,
            "engines": {"main": {"kind": "openai_compatible", "url": engine.url}},
            "policies": {"default": {"engine": "main", "model": "scripted", **policy}},
        }
    )
    async with Rolltap.running(settings) as app:
        socket, stop = bind("127.0.0.1", 0), asyncio.Event()
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        serving = asyncio.create_task(serve({"agent": (app.planes["agent"], socket)}, stop))
        try:
            yield app, url
        finally:
            stop.set()
            await serving


def client_of(app: Rolltap, url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=app.settings.keys.project, max_retries=0)


async def rows_of(app: Rolltap) -> list[Any]:
    (session,) = await app.call_log.sessions()
    return list(await app.call_log.rows(session.id))


async def two_turns(client: openai.AsyncOpenAI) -> list[Any]:
    """A tool call and its answer, streamed; the deltas of the first turn."""
    first: Any = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    chunks: list[Any] = []
    common: Any = {"model": "default", "tools": [BASH]}
    async for chunk in await client.chat.completions.create(messages=[USER], stream=True, **common):  # type: ignore[call-overload]
        chunks.append(chunk)
        for choice in chunk.choices:
            first["content"] += choice.delta.content or ""
            first["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for piece in choice.delta.tool_calls or ():
                if piece.id:
                    first["tool_calls"].append(
                        {"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}}
                    )
                first["tool_calls"][piece.index]["function"]["arguments"] += piece.function.arguments or ""
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
    history: Any = [USER, first, result]
    done: Any = await client.chat.completions.create(messages=history, **common)
    assert done.choices[0].message.content == "There are three."
    return chunks


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_tokens_are_captured_and_proven(tmp_path: Path, wire: str) -> None:
    async with (
        ScriptedEngine(say(LOOK, "There are three."), FOLDER, wire=wire) as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
    ):
        async with client_of(app, url) as client:
            chunks = await two_turns(client)
        one, two = await rows_of(app)
        asked = [entry for entry in engine.journal.entries if len(entry.output) > 1]
    assert len(chunks) > 4
    for row, entry in zip((one, two), asked, strict=True):
        assert row.prompt_ids.tolist() == entry.prompt_ids
        assert row.completion.output_ids.tolist() == list(entry.output)
        expected = [logprob_of(token, at) for at, token in enumerate(entry.output)]
        np.testing.assert_allclose(row.completion.logprobs, expected, rtol=1e-6)
        assert row.completion.flaw is None
    assert two.intent.parent_id == one.intent.id
    extends = asked[1].extends is True
    assert (two.intent.break_ is None) is extends


async def test_the_upstream_gets_a_split_reply_as_one(tmp_path: Path) -> None:
    """A client may send every call with its own result: the upstream renders the turn that it sampled."""
    look = ScriptedReply(say="I look.", call=(ToolUse("bash", {"command": "ls"}), ToolUse("bash", {"command": "pwd"})))
    async with (
        ScriptedEngine(say(look), FOLDER, wire="vllm") as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
    ):
        async with client_of(app, url) as client:
            common: Any = {"model": "default", "tools": [BASH]}
            first = await client.chat.completions.create(messages=[USER], **common)  # type: ignore[list-item]
            one, two = (call.model_dump() for call in first.choices[0].message.tool_calls or ())
            results = [{"role": "tool", "tool_call_id": call["id"], "content": call["id"][-3:]} for call in (one, two)]
            whole: list[Any] = [{"role": "assistant", "content": "I look.", "tool_calls": [one, two]}, *results]
            split: list[Any] = [
                {"role": "assistant", "content": "I look.", "tool_calls": [one]},
                results[0],
                {"role": "assistant", "content": None, "tool_calls": [two]},
                results[1],
            ]
            for turn in (whole, split):
                messages: Any = [USER, *turn]
                await client.chat.completions.create(messages=messages, **common)
        _, *rows = await rows_of(app)
    assert rows[0].prompt_ids.tolist() == rows[1].prompt_ids.tolist()
    assert rows[0].intent.parent_id == rows[1].intent.parent_id is not None


async def test_text_alone_is_recorded_and_never_trained(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(say(LOOK, "There are three."), FOLDER, wire="openai") as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
    ):
        async with client_of(app, url) as client:
            await two_turns(client)
        one, two = await rows_of(app)
    assert two.intent.parent_id == one.intent.id
    for row in (one, two):
        assert row.completion.outcome is Outcome.COMPLETED
        assert row.completion.flaw is Flaw.TOKENS_MISSING
        assert not row.call().trainable
        assert row.completion.message
    assert one.completion.usage["output"] > 0


@pytest.mark.parametrize(("wire", "intents_at_first_event"), [("vllm", 1), ("openai", 0)])
async def test_the_intent_is_durable_once_the_prompt_is_reported(
    tmp_path: Path, wire: str, intents_at_first_event: int
) -> None:
    """vLLM reports the prompt before the first byte of its reply. Without a report the completion brings the intent."""
    intents_at_request: list[int] = []

    def reply(_: Prompt) -> ScriptedReply:
        intents_at_request.append(intents_in(tmp_path))
        return ScriptedReply(say="one two three", hold=2)

    async with ScriptedEngine(reply, FOLDER, wire=wire) as engine, chat_mode_proxy(tmp_path, engine) as (app, url):
        async with client_of(app, url) as client:
            asked: Any = {"model": "default", "messages": [USER], "stream": True}
            reply_events = await client.chat.completions.create(**asked)
            await anext(reply_events)
            intents = intents_in(tmp_path)
            engine.release()
            async for _ in reply_events:
                pass
        assert intents_in(tmp_path) == 1
    assert intents == intents_at_first_event
    assert set(intents_at_request) == {0}


def intents_in(folder: Path) -> int:
    """The intents that the store in `folder` has on disk."""
    with closing(sqlite3.connect(folder / DATABASE)) as store:
        return store.execute("SELECT count(*) FROM call_intents").fetchone()[0]


async def test_each_choice_of_a_chat_upstream_has_a_seed_of_its_own(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(say("x", "x", "x"), FOLDER, wire="openai") as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
    ):
        async with client_of(app, url) as client:
            await client.chat.completions.create(model="default", messages=[USER], n=3, seed=7)  # type: ignore[list-item]
        rows = await rows_of(app)
    assert sorted(row.intent.sampling_sent["seed"] for row in rows) == [7, 8, 9]


async def test_an_upstream_that_fails_has_its_status_and_its_record(tmp_path: Path) -> None:
    fault = Fault(kind="status", status=429, retry_after=30, times=9)
    async with (
        ScriptedEngine(say(ScriptedReply(say="x", fault=fault)), FOLDER, wire="vllm") as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
    ):
        async with client_of(app, url) as client:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="default", messages=[USER])  # type: ignore[list-item]
        (row,) = await rows_of(app)
    assert row.completion.outcome is Outcome.ENGINE_ERROR


async def test_what_a_chat_api_cannot_give_is_refused_by_name(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(say("x"), FOLDER, wire="vllm") as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
        client_of(app, url) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            await client.chat.completions.create(model="default", messages=[USER], logprobs=True)  # type: ignore[list-item]


async def test_the_admin_plane_has_the_counters(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(say("x"), FOLDER, wire="openai") as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
        client_of(app, url) as client,
    ):
        await client.chat.completions.create(model="default", messages=[USER])  # type: ignore[list-item]
        transport = httpx.ASGITransport(app.planes["admin"])
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
            assert (await admin.get("/metrics")).status_code == 401
            headers = {"authorization": f"Bearer {app.settings.keys.admin}"}
            found = await admin.get("/metrics", headers=headers)
    assert found.headers["content-type"].startswith("text/plain; version=")
    assert 'rolltap_calls_total{outcome="completed",policy="default"} 1.0\n' in found.text
    assert 'rolltap_flaws_total{flaw="tokens_missing",policy="default"} 1.0\n' in found.text
    assert 'rolltap_engine_up{engine="main"} 1.0\n' in found.text


def test_surplus_calls_of_an_upstream_are_left_out_and_marked() -> None:
    parser = ChatReplyParser(ChatRequest("test", "default", ()), lambda at: Handles(b"0" * 16).mint(new_id(), at), 0)
    for position in range(1100):
        parser.feed(ChatChunk(tool_calls=(ToolDelta(position, "{", name="bash"), ToolDelta(position, "}"))))
    _, choice = parser.finish("stop")
    assert [call.arguments for call in choice.message.tool_calls] == ["{}"] * MAX_CALLS
    assert parser.unparsable
