"""With a project's key and no conversation header, a call belongs where the handles of its last reply say,
or else where its reply is and no call follows it yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rolltap.errors import EngineError

from .conftest import TURN, serve, wait_for_text

USER = {"role": "user", "content": "list the files"}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


async def ask(plane: Any, *messages: Any) -> Any:
    """The reply's message."""
    answer = await plane.client.chat(*messages, tools=TOOLS, key="project-key")
    assert answer.status == 200
    return answer.json()["choices"][0]["message"]


async def go_on(plane: Any, reply: Any) -> None:
    """The next call of a conversation, by a client that drops thinking."""
    said = {"role": "assistant", "content": reply.get("content"), "tool_calls": reply["tool_calls"]}
    await ask(plane, USER, said, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "a.txt"})


async def captured(plane: Any) -> list[str]:
    return [session.id for session in await plane.log.sessions() if session.tags.get("captured")]


async def test_conversations_that_read_the_same_stay_apart(plane: Any) -> None:
    thought = "<think>\n%s\n</think>\n\n" + TURN
    plane.engine.replies = [thought % "one way", thought % "the other way"]
    replies = [await ask(plane, USER), await ask(plane, USER)]
    for reply in replies:
        await go_on(plane, reply)
    for session in await captured(plane):
        first, second = await plane.rows(session)
        assert (second.intent.parent_id, second.intent.break_) == (first.intent.id, None)


async def text_conversations(plane: Any) -> Any:
    """The common reply of two conversations that read the same and call no tool, so that no handle comes back."""
    plane.engine.replies = ["Which one?<|im_end|>"] * 2
    reply, _ = [await ask(plane, USER), await ask(plane, USER)]
    return {"role": "assistant", "content": reply["content"]}


def follow_up(reply: Any, text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [USER, reply, {"role": "user", "content": text}], "tools": TOOLS}


async def lengths(plane: Any) -> list[int]:
    return sorted([len(await plane.rows(session)) for session in await captured(plane)])


@pytest.mark.parametrize("texts", [("this", "that"), ("go on", "go on")])
async def test_text_conversations_that_read_the_same_stay_apart(plane: Any, texts: tuple[str, str]) -> None:
    reply = await text_conversations(plane)
    for text in texts:
        await plane.client.post("/v1/chat/completions", follow_up(reply, text), key="project-key")
    for session in await captured(plane):
        first, second = await plane.rows(session)
        assert (second.intent.parent_id, second.intent.break_) == (first.intent.id, None)


async def test_text_conversations_stay_apart_if_they_go_on_at_once(plane: Any) -> None:
    reply = await text_conversations(plane)
    bodies = [follow_up(reply, text) for text in ("this", "that")]
    tasks = [plane.client.start("/v1/chat/completions", body, key="project-key")[2] for body in bodies]
    await asyncio.gather(*tasks)
    assert await lengths(plane) == [2, 2]


async def test_a_repeated_request_stays_with_its_failed_call(plane: Any) -> None:
    reply = await text_conversations(plane)
    plane.engine.replies, plane.engine.failure = ["x<|im_end|>"], EngineError("down")
    body = follow_up(reply, "this")
    failed = await plane.client.post("/v1/chat/completions", body, key="project-key")
    plane.engine.failure = None
    repeated = await plane.client.post("/v1/chat/completions", body, key="project-key")
    assert (failed.status, repeated.status) == (502, 200)
    assert await lengths(plane) == [1, 3]


async def test_a_marked_retry_joins_its_call_beside_a_conversation_that_reads_the_same(plane: Any) -> None:
    reply = await text_conversations(plane)
    body = {**follow_up(reply, "this"), "stream": True}
    plane.engine.hold, plane.engine.replies = asyncio.Event(), ["a long answer<|im_end|>"]
    answer, _, first = plane.client.start("/v1/chat/completions", body, key="project-key")
    await wait_for_text(answer, "long")
    again, _, retry = plane.client.start(
        "/v1/chat/completions", body, key="project-key", headers={"x-stainless-retry-count": "1"}
    )
    await wait_for_text(again, "long")
    plane.engine.hold.set()
    await asyncio.gather(first, retry)
    assert await lengths(plane) == [1, 2]


async def test_a_conversation_goes_on_through_another_proxy(plane: Any) -> None:
    plane.engine.replies = [TURN]
    reply = await ask(plane, USER)
    await go_on(serve(plane.log, plane.engine, plane.session, plane.limits), reply)
    (session,) = await captured(plane)
    assert [row.intent.break_ for row in await plane.rows(session)] == [None, None]


async def test_a_session_that_has_ended_is_not_gone_on_with(plane: Any) -> None:
    plane.engine.replies = [TURN]
    reply = await ask(plane, USER)
    (ended,) = await captured(plane)
    await plane.log.close_session(ended, 1.0)
    await go_on(serve(plane.log, plane.engine, plane.session, plane.limits), reply)
    assert len(await captured(plane)) == 2
    assert len(await plane.rows(ended)) == 1
