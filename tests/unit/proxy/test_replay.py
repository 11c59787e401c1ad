"""A recorded session answers a harness that runs again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rolltap.contract.tags import ReplayedSession
from rolltap.ids import new_id
from rolltap.proxy.sessions.live_sessions import key_hash
from rolltap.tokenizer import HubTokenizer
from rolltap.types import Origin, Session

from .conftest import TURN, Plane, ToldEngine, serve
from .test_session_rules import HINT, LIMITS, SessionRules, plane_with, say, user

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


async def recorded(tokenizer: HubTokenizer, rules: SessionRules | None = None) -> Plane:
    """A session of three turns, the first with a tool call."""
    plane = await plane_with(tokenizer, rules or SessionRules())
    history = await say(plane, [user("Look.")], TURN, tools=TOOLS)
    history = [*history, result(history)]
    history = await say(plane, history, "It has a.py.<|im_end|>", tools=TOOLS)
    await say(plane, [*history, user("And?")], "No more.<|im_end|>", tools=TOOLS)
    return plane


def result(history: list[dict[str, Any]], text: str = "a.py") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": text}


async def replayed(plane: Plane, calls: int | None = None) -> Plane:
    """Another process on the same record, with a session that the recorded one answers."""
    tags = {**plane.session.tags, **ReplayedSession(plane.session.id, calls).tags()}
    session = Session(new_id(), "tiny", key_hash("again"), 0.0, 1e12, tags=tags)
    await plane.log.open_session(session)
    return serve(plane.log, ToldEngine(plane.engine.tokenizer), session, LIMITS)


async def ask(plane: Plane, history: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    answer = await plane.client.chat(*history, key="again", **options)
    assert answer.status == 200, answer.body
    return [*history, answer.json()["choices"][0]["message"]]


async def test_the_same_harness_gets_the_same_tokens_and_asks_no_engine(tokenizer: HubTokenizer) -> None:
    first = await recorded(tokenizer, SessionRules(messages=(HINT,)))
    again = await replayed(first)
    history = await ask(again, [user("Look.")], tools=TOOLS)
    history = await ask(again, [*history, result(history)], tools=TOOLS)
    history = await ask(again, [*history, user("And?")], tools=TOOLS)
    assert history[-1]["content"] == "No more."
    assert not again.engine.seen
    for before, after in zip(await first.rows(), await again.rows(), strict=True):
        assert before.prompt_ids.tolist() == after.prompt_ids.tolist()
        assert before.completion.output_ids.tolist() == after.completion.output_ids.tolist()
        assert before.completion.logprobs.tolist() == after.completion.logprobs.tolist()
        assert before.completion.versions == after.completion.versions
        assert after.intent.break_ is None


async def test_the_first_difference_stops_it_with_both_sides(tokenizer: HubTokenizer) -> None:
    again = await replayed(await recorded(tokenizer))
    history = await ask(again, [user("Look.")], tools=TOOLS)
    history = await ask(again, [*history, result(history)], tools=TOOLS)
    answer = await again.client.chat(*history, user("And now?\nTell me."), key="again", tools=TOOLS)
    assert answer.status == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("call 3: the harness sends something else")
    assert "- And?" in message
    assert "+ And now?\n+ Tell me." in message
    assert "[message 5: user]" in message
    assert (await again.rows())[-1].completion.error.startswith("replay_differs: call 3")
    other = await again.client.chat(user("Look."), key="again", tools=TOOLS, stop=["x"])
    assert "other sampling" in other.json()["error"]["message"]


async def test_a_call_more_than_on_record(tokenizer: HubTokenizer) -> None:
    again = await replayed(await recorded(tokenizer))
    history = await ask(again, [user("Look.")], tools=TOOLS)
    history = await ask(again, [*history, result(history)], tools=TOOLS)
    history = await ask(again, [*history, user("And?")], tools=TOOLS)
    answer = await again.client.chat(*history, user("Sure?"), key="again", tools=TOOLS)
    assert answer.status == 400
    assert "the record has no more calls" in answer.json()["error"]["message"]
    assert "+ Sure?" in answer.json()["error"]["message"]


async def test_up_to_a_call_then_the_engine(tokenizer: HubTokenizer) -> None:
    first = await recorded(tokenizer)
    again = await replayed(first, calls=2)
    history = await ask(again, [user("Look.")], tools=TOOLS)
    history = await ask(again, [*history, result(history)], tools=TOOLS)
    again.engine.replies = ["Something else.<|im_end|>"]
    history = await ask(again, [*history, user("What else?")], tools=TOOLS)
    assert history[-1]["content"] == "Something else."
    assert len(again.engine.seen) == 1
    rows, before = await again.rows(), await first.rows()
    assert [row.intent.break_ for row in rows] == [None] * 3
    shared = len(before[1].prompt_ids) + len(before[1].completion.output_ids)
    assert rows[2].intent.shared == shared


async def test_a_stream_a_retry_and_choices(tokenizer: HubTokenizer) -> None:
    plane = await plane_with(tokenizer, SessionRules())
    plane.engine.replies = ["one<|im_end|>", "two<|im_end|>"]
    await plane.client.chat(user("Pick."), n=2)
    await plane.client.chat(user("Stream."), stream=True)
    again = await replayed(plane)
    answer = await again.client.chat(user("Pick."), n=2, key="again")
    assert sorted(each["message"]["content"] for each in answer.json()["choices"]) == ["one", "two"]
    answer = await again.client.chat(user("Stream."), stream=True, key="again")
    assert b'"content":"ok"' in answer.body
    answer = await again.client.chat(user("Stream."), stream=True, key="again")  # again: it did not come
    assert b'"content":"ok"' in answer.body
    assert not again.engine.seen


async def fork_of(plane: Plane, at: int | None) -> tuple[Plane, list[dict[str, Any]]]:
    """A fork of the second call of a recorded session, with two samples and a turn, and what it was asked."""
    history = await say(plane, [user("Look.")], TURN, tools=TOOLS)
    asked = [*history, result(history)]
    history = await say(plane, asked, "It has a.py.<|im_end|>", tools=TOOLS)
    origin = Origin(plane.session.id, (await plane.rows())[-1].intent.id, at)
    fork = replace(plane.session, id=new_id(), key_hash=key_hash("fork"), origin=origin)
    await plane.log.open_session(fork)
    served = serve(plane.log, ToldEngine(plane.engine.tokenizer), fork, LIMITS)
    first = asked if at is not None else [*history, user("And?")]
    served.engine.replies = [" one.<|im_end|>", " two.<|im_end|>"]
    answers = [await served.client.chat(*first, tools=TOOLS, key="fork") for _ in range(2)]
    more = [*first, answers[1].json()["choices"][0]["message"], user("Sure?")]
    served.engine.replies = [" Yes.<|im_end|>"]
    assert (await served.client.chat(*more, tools=TOOLS, key="fork")).status == 200
    return served, first


@pytest.mark.parametrize("at", [None, 0, 2])
@pytest.mark.parametrize("calls", [None, 2])
async def test_a_fork_is_replayed_behind_its_origin(tokenizer: HubTokenizer, at: int | None, calls: int | None) -> None:
    rules = SessionRules(messages=(HINT,))
    fork, first = await fork_of(await plane_with(tokenizer, rules), at)
    tags = {**fork.session.tags, **ReplayedSession(fork.session.id, calls).tags()}
    session = Session(new_id(), "tiny", key_hash("again"), 0.0, 1e12, tags=tags, origin=fork.session.origin)
    await fork.log.open_session(session)
    again = serve(fork.log, ToldEngine(tokenizer), session, LIMITS)
    wrong = await again.client.chat(user("Another."), tools=TOOLS, key="again")
    assert wrong.json()["error"]["message"].startswith("call 1: the harness sends something else")
    _, history = [await ask(again, first, tools=TOOLS) for _ in range(2)]
    again.engine.replies = [" Yes.<|im_end|>"]
    await ask(again, [*history, user("Sure?")], tools=TOOLS)
    assert len(again.engine.seen) == (calls is not None)
    for before, after in zip(await fork.rows(), (await again.rows())[1:], strict=True):
        assert before.prompt_ids.tolist() == after.prompt_ids.tolist()
        assert before.completion.output_ids.tolist() == after.completion.output_ids.tolist()
        assert (before.intent.parent_id is None) == (after.intent.parent_id is None)
        assert after.intent.break_ is None


async def test_a_fork_of_a_replay_goes_on_with_its_tokens(tokenizer: HubTokenizer) -> None:
    again = await replayed(await recorded(tokenizer))
    history = await ask(again, [user("Look.")], tools=TOOLS)
    asked = [*history, result(history)]
    await ask(again, asked, tools=TOOLS)
    last = (await again.rows())[-1]
    fork = Session(new_id(), "tiny", key_hash("fork"), 0.0, 1e12, origin=Origin(again.session.id, last.intent.id, 1))
    await again.log.open_session(fork)
    again.engine.replies = [" nothing.<|im_end|>"]
    answer = await again.client.chat(*asked, tools=TOOLS, key="fork")
    assert answer.json()["choices"][0]["message"]["content"] == "I nothing."
    (row,) = await again.rows(fork.id)
    assert row.prompt_ids.tolist() == [*last.prompt_ids.tolist(), *last.completion.output_ids.tolist()[:1]]
