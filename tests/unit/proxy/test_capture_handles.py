"""With a project's key and no conversation header, a call belongs where the handles of its last reply say."""

from __future__ import annotations

from typing import Any

from .conftest import TURN, serve

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
