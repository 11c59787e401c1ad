"""What is streamed is what was sampled: whole characters, no stop string, and never more than the reply says."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.proxy.chat import ReasoningDelta, TextDelta, Tool, ToolCallDelta, ToolCallStarted
from rolltap.proxy.continuation.parser import ReplyParser

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BASH = Tool("bash", "", {"type": "object"})
PROMPT = "<|im_start|>assistant\n"


def parser(renderer: Any, stop: tuple[str, ...] = (), tools: tuple[Tool, ...] = (BASH,)) -> ReplyParser:
    return ReplyParser(renderer, renderer.tokenizer.encode(PROMPT), tools, stop, lambda at: f"id{at}")


def run(reader: ReplyParser, ids: list[int], sizes: list[int]) -> tuple[list[Any], Any]:
    events: list[Any] = []
    while ids and reader.stopped is None:
        size = sizes.pop() if sizes else 1
        events += reader.feed(ids[:size])
        ids = ids[size:]
    last, choice = reader.finish("stop")
    return events + last, choice


def text_of(events: list[Any], kind: Any = TextDelta) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@PROPERTY
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 5), max_size=30))
def test_streamed_text_is_the_reply(family: Any, text: str, sizes: list[int]) -> None:
    tokenizer = family.tokenizer
    ids = tokenizer.encode(tokenizer.guard(text)) + [family.stop_token_ids[0]]
    events, choice = run(parser(family), ids, sizes)
    assert text_of(events) == choice.message.text
    assert choice.message.text == tokenizer.decode(ids[:-1]).strip()


@PROPERTY
@given(ids=st.lists(st.integers(0, 900), max_size=40), sizes=st.lists(st.integers(1, 5), max_size=30))
def test_any_tokens_at_all_give_a_consistent_reply(family: Any, ids: list[int], sizes: list[int]) -> None:
    events, choice = run(parser(family), list(ids), sizes)
    assert text_of(events) == choice.message.text
    assert text_of(events, ReasoningDelta) == choice.message.reasoning
    started = [event.name for event in events if isinstance(event, ToolCallStarted)]
    assert started == [call.name for call in choice.message.tool_calls]


@PROPERTY
@given(before=st.text("abc STO\n", max_size=12), after=st.text("abcSTOP", max_size=8), cut=st.integers(1, 4))
def test_a_stop_string_is_never_seen(family: Any, before: str, after: str, cut: int) -> None:
    text = before + "STOP" + after
    reader = parser(family, stop=("STOP",))
    events, choice = run(reader, family.tokenizer.encode(text), [cut] * 20)
    assert "STOP" not in text_of(events)
    assert text_of(events) == choice.message.text == text[: text.index("STOP")].strip()
    assert choice.stop == "STOP"


def test_a_call_comes_when_its_block_is_closed(family: Any) -> None:
    ids = family.tokenizer.encode('Look. <tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    reader = parser(family)
    events = reader.feed(ids[:-1])
    assert text_of(events) == "Look."
    assert not any(isinstance(event, ToolCallStarted) for event in events)
    events = reader.feed(ids[-1:])
    deltas = [event.arguments for event in events if isinstance(event, ToolCallDelta)]
    assert [json.loads(delta) for delta in deltas] == [{"command": "ls"}]


def test_parallel_calls_keep_their_order_and_ids(family: Any) -> None:
    block = '<tool_call>\n{{"name": "bash", "arguments": {{"command": "{}"}}}}\n</tool_call>'.format
    ids = family.tokenizer.encode(block("ls") + "\n" + block("pwd")) + [family.stop_token_ids[0]]
    _, choice = run(parser(family), ids, [])
    assert [call.id for call in choice.message.tool_calls] == ["id0", "id1"]
    assert choice.finish == "tool_calls"


def test_a_block_that_is_no_call_stays_visible(family: Any) -> None:
    ids = family.tokenizer.encode("<tool_call>\n{broken\n</tool_call>") + [family.stop_token_ids[0]]
    reader = parser(family)
    _, choice = run(reader, ids, [])
    assert "{broken" in choice.message.text
    assert choice.message.tool_calls == ()
    assert reader.unparsable


def test_thinking_is_a_channel_of_its_own(family: Any) -> None:
    ids = family.tokenizer.encode("<think>\nwhy not\n</think>\n\nBecause.") + [family.stop_token_ids[0]]
    events, choice = run(parser(family), ids, [])
    assert text_of(events, ReasoningDelta) == choice.message.reasoning == "why not"
    assert text_of(events) == choice.message.text == "Because."


def test_a_custom_tool_gets_free_text(family: Any) -> None:
    tool = Tool("exec", "", None, "custom")
    body = json.dumps({"name": "exec", "arguments": {"input": "print(1)"}})
    ids = family.tokenizer.encode(f"<tool_call>\n{body}\n</tool_call>") + [family.stop_token_ids[0]]
    _, choice = run(parser(family, tools=(tool,)), ids, [])
    assert choice.message.tool_calls[0].arguments == "print(1)"
    assert choice.message.tool_calls[0].kind == "custom"
