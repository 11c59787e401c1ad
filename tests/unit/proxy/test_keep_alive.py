"""Streams show signs of life while the engine thinks, each in the form that its clients survive."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rolltap.errors import EngineError, RateLimited
from rolltap.proxy.call.http_exchange import BrokenReply

USER = {"role": "user", "content": "hi"}
TURNS = [USER]
CHAT = ("/v1/chat/completions", {"model": "tiny", "messages": TURNS, "stream": True})
RESPONSES = ("/v1/responses", {"model": "tiny", "input": "hi", "stream": True})
MESSAGES = ("/v1/messages", {"model": "tiny", "messages": TURNS, "stream": True, "max_tokens": 64})
GEMINI = (
    "/v1beta/models/tiny:streamGenerateContent",
    {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
)
ALIVE = {"chat": b": keep-alive", "responses": b'"type":"response.in_progress"', "messages": b"event: ping"}


async def held(plane: Any, route: tuple[str, Any]) -> tuple[Any, asyncio.Task[None]]:
    """A call whose engine has been asked and says nothing."""
    plane.engine.hold = asyncio.Event()
    plane.engine.replies = ["<|im_end|>"]
    path, body = route
    answer, _, task = plane.client.start(path, body, query="alt=sse")
    while not plane.engine.seen:  # noqa: ASYNC110  the engine's log is the event
        await asyncio.sleep(0)
    return answer, task


async def kept_alive(plane: Any, route: tuple[str, Any], alive: bytes) -> tuple[Any, asyncio.Task[None]]:
    """The same, kept alive three times by `alive`."""
    answer, task = await held(plane, route)
    async with asyncio.timeout(20):
        while answer.body.count(alive) < 3:
            answer.grown.clear()
            await answer.grown.wait()
    return answer, task


async def not_kept_alive(plane: Any, route: tuple[str, Any]) -> tuple[Any, asyncio.Task[None]]:
    """The same, for as long as several keep-alives take: nothing to await, since nothing is to come."""
    answer, task = await held(plane, route)
    await asyncio.sleep(plane.limits.keep_alive_s * 4.5)
    return answer, task


@pytest.mark.parametrize(
    ("route", "alive"),
    [(CHAT, ALIVE["chat"]), (RESPONSES, ALIVE["responses"]), (MESSAGES, ALIVE["messages"])],
    ids=list(ALIVE),
)
async def test_a_slow_engine_is_waited_for(brisk: Any, route: tuple[str, Any], alive: bytes) -> None:
    answer, task = await kept_alive(brisk, route, alive)
    assert answer.status == 200
    before = len(answer.body)
    brisk.engine.hold.set()
    await task
    assert answer.ended
    assert len(answer.body) > before


async def test_codex_sees_numbered_events_and_no_comments(brisk: Any) -> None:
    answer, task = await kept_alive(brisk, RESPONSES, ALIVE["responses"])
    brisk.engine.hold.set()
    await task
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert not any(line.startswith(b":") for line in answer.body.splitlines())


async def test_the_gemini_cli_sees_nothing(brisk: Any) -> None:
    answer, task = await not_kept_alive(brisk, GEMINI)
    assert (answer.status, answer.body) == (0, b"")
    brisk.engine.hold.set()
    await task
    lines = [line for line in answer.body.splitlines() if line]
    assert lines
    assert all(line.startswith(b"data: {") for line in lines)


async def test_a_reply_that_is_not_streamed_has_none(brisk: Any) -> None:
    answer, task = await not_kept_alive(brisk, (CHAT[0], {**CHAT[1], "stream": False}))
    assert answer.status == 0
    brisk.engine.hold.set()
    await task
    assert answer.json()["choices"]


async def test_what_fails_after_a_keep_alive_is_cut(brisk: Any) -> None:
    brisk.engine.failure = EngineError("broke off")
    answer, task = await kept_alive(brisk, CHAT, ALIVE["chat"])
    brisk.engine.hold.set()
    with pytest.raises(BrokenReply):
        await task
    assert not answer.ended


async def test_what_fails_before_one_has_its_own_status(plane: Any) -> None:
    plane.engine.failure = RateLimited("asks to wait", retry_after=3)
    plane.engine.replies = ["<|im_end|>"]
    answer = await plane.client.post(*CHAT)
    assert answer.status == 429
