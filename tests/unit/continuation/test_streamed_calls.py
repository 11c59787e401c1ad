"""A call is told from where its arguments begin, in the text that was sampled; and nothing told is ever taken back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.protocols.contents import check_arguments
from rolltap.protocols.conversation import (
    Choice,
    Message,
    Part,
    Reasoning,
    ReasoningDelta,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from rolltap.proxy.continuation.parser import ReplyParser

from .conftest import BASH
from .making import fed

PROPERTY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EXEC = Tool("exec", "", None, "custom")
ARGUMENTS = [
    '{"command": "ls"}',
    '{ "n":1.0,\n "deep" : {"a": [null, true, "é \\u00e9 ☕"]} }',
    '{"command": "echo </tool_call> {\\"x\\"}"}',
    "{}",
    '{"n": 120, "m": -1e5}',
    '{"n": 01}',
    '{"a": 1,, "b": 2}',
    '{"a": "line\nbreak"}',
]
BLOCKS = [
    *(f'\n{{"name": "bash", "arguments": {arguments}}}\n' for arguments in ARGUMENTS),
    '{"name":"bash","arguments":{"a": 1}',
    '{"name": "bash", "arguments": {"a": 1}, "arguments": {"a": 2}, "name": "other"}',
    '{"arguments": {"a":  1}, "name": "bash"}',
    '{"name": "exec", "arguments": {"input": "print(1)"}}',
    "{broken",
    '{"name": "bash"}',
]
CALLS = st.sampled_from([f"<tool_call>{block}</tool_call>" for block in BLOCKS])
SAID = st.sampled_from(["I look.", "naïve ☕ 👩‍👩‍👧", "\n\n", "ST STO", "a <b> c"])


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def accumulated(events: list[Any]) -> Message:
    """What a client has when all events are in. The events of a call stand together."""
    thought, said = "", ""
    calls: list[ToolCall] = []
    open_at: int | None = None
    for event in events:
        match event:
            case ReasoningDelta(text):
                thought += text
            case TextDelta(text):
                said += text
            case ToolCallStarted(position, id, name, kind):
                assert (open_at, position) == (None, len(calls))
                open_at = position
                calls.append(ToolCall(id, name, "", kind))
            case ToolCallDelta(position, arguments):
                assert (position, bool(arguments)) == (open_at, True)
                last = calls.pop()
                calls.append(ToolCall(last.id, last.name, last.arguments + arguments, last.kind))
            case ToolCallEnded(position):
                assert position == open_at
                open_at = None
        assert open_at is None or isinstance(event, ToolCallStarted | ToolCallDelta)
    assert open_at is None
    parts: tuple[Part, ...] = (Reasoning(thought),) if thought else ()
    return Message("assistant", (*parts, Text(said)) if said else parts, tuple(calls))


def read(
    renderer: Any, ids: list[int], sizes: list[int] | None = None, stops: tuple[str, ...] = (), finish: Any = "stop"
):
    """The events, the reply and the reader, fed in chunks of `sizes` and then singly."""
    reader = ReplyParser(renderer, [], (BASH, EXEC), stops, lambda at: f"id{at}")
    events, choice = fed(reader, ids, sizes or [], finish)
    return events, choice, reader


def read_text(renderer: Any, text: str, finish: Any = "stop") -> tuple[list[Any], Choice, ReplyParser]:
    return read(renderer, renderer.tokenizer.encode(text), finish=finish)


@PROPERTY
@given(
    thought=st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>\nhm "]),
    said=st.lists(SAID | CALLS, max_size=4),
    kept=st.integers(0, 250),
    stops=st.sampled_from([(), ("STOP", "break")]),
    sizes=st.lists(st.integers(1, 9), max_size=40),
)
def test_what_a_client_accumulates_is_the_reply_however_the_tokens_come(
    either: Any, thought: str, said: list[str], kept: int, stops: tuple[str, ...], sizes: list[int]
) -> None:
    ids = either.tokenizer.encode(thought + "".join(said))[:kept]
    events, choice, reader = read(either, ids, sizes, stops)
    assert accumulated(events) == choice.message
    _, again, single = read(either, ids, [], stops)
    assert (again, single.consumed) == (choice, reader.consumed)


@PROPERTY
@given(ids=st.lists(st.integers(0, 900) | st.sampled_from([874, 875, 878, 879]), max_size=60), data=st.data())
def test_any_tokens_at_all_within_a_call_are_told_the_same_way(either: Any, ids: list[int], data: Any) -> None:
    """Halves of characters and special tokens among them."""
    ids = either.tokenizer.encode('<tool_call>\n{"name": "bash", "arguments": {"a": "') + ids
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=30))
    events, choice, _ = read(either, ids, sizes)
    assert accumulated(events) == choice.message
    assert read(either, ids)[1] == choice


@pytest.mark.parametrize("arguments", ARGUMENTS[:5])
def test_arguments_come_as_they_are_sampled_and_in_that_text(either: Any, arguments: str) -> None:
    guarded = either.tokenizer.guard(arguments)
    before = either.tokenizer.encode(f'I look.\n<tool_call>\n{{"name": "bash", "arguments": {guarded}')
    ids = before + either.tokenizer.encode("}\n</tool_call><|im_end|>")
    reader = ReplyParser(either, [], (BASH,), (), lambda at: f"id{at}")
    seen: list[Any] = [event for token in before for event in reader.feed([token])]
    started = next(at for at, event in enumerate(seen) if isinstance(event, ToolCallStarted))
    assert "".join(event.arguments for event in seen[started + 1 :]) == arguments
    assert len(seen) - started > 3 or len(arguments) < 5
    _, choice, reader = read(either, ids)
    assert choice.message.tool_calls == (ToolCall("id0", "bash", arguments),)
    assert (choice.finish, reader.unparsable) == ("tool_calls", False)


@pytest.mark.parametrize("echo", ['{"command": "ls"}', '{"command": "ls", "n": ', '{"command":"ls","n":'])
def test_a_call_that_was_cut_off_is_continued(world: Any, echo: str) -> None:
    """Some clients send back the members that they could read, others the text."""
    first = world.call(user("list"), output='<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": 12')
    assert first.reply is not None
    turn = Message("assistant", (), (ToolCall(first.reply.tool_calls[0].id, "bash", echo),))
    result = Message("tool", (Text("cut off"),), tool_call_id=turn.tool_calls[0].id)
    plan = world.plan(world.request(user("list"), turn, result))
    context = first.context_ids()
    assert plan.break_ is None
    assert plan.prompt_ids[: len(context)].tolist() == context.tolist()
    other = Message("assistant", (), (ToolCall(first.reply.tool_calls[0].id, "bash", '{"command": "rm"}'),))
    assert world.plan(world.request(user("list"), other, result)).break_ is not None
    assert world.renderer.render([user("list"), turn, result], (BASH,), thinking=True)


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_call_that_was_cut_off_is_told_as_far_as_it_goes(either: Any, finish: str) -> None:
    events, choice, reader = read_text(
        either, '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": 12', finish
    )
    assert (
        choice.message
        == accumulated(events)
        == Message("assistant", (), (ToolCall("id0", "bash", '{"command": "ls", "n": '),))
    )
    assert (choice.finish, reader.unparsable) == (finish, True)


def test_a_block_without_a_beginning_of_arguments_is_text(either: Any) -> None:
    events, choice, reader = read_text(either, '<tool_call>\n{"name": "bash", "arguments": ', "length")
    assert choice.message.tool_calls == ()
    assert '{"name": "bash"' in choice.message.text
    assert not any(isinstance(event, ToolCallStarted) for event in events)
    assert reader.unparsable


@pytest.mark.parametrize(
    ("block", "arguments", "finish"),
    [
        ('{"name": "bash", "arguments": {"a": 1,, "b": 2}}', '{"a": 1,', "stop"),
        ('{"name": "bash", "arguments": {"a": "x\ny"}}', '{"a": "x', "stop"),
        ('{"name": "bash", "arguments": {"a": 1}', '{"a": 1}', "tool_calls"),
    ],
)
def test_a_broken_block_is_marked_and_told_as_far_as_it_is_json(
    either: Any, block: str, arguments: str, finish: str
) -> None:
    """A client that can read the arguments may run the call; where it can't, the reply does not say that it should."""
    _, choice, reader = read_text(either, f"<tool_call>\n{block}\n</tool_call><|im_end|>")
    assert choice.message == Message("assistant", (), (ToolCall("id0", "bash", arguments),))
    assert (choice.finish, reader.unparsable) == (finish, True)


def test_what_was_said_first_counts(either: Any) -> None:
    block = '{"name": "bash", "arguments": {"a": 1}, "name": "other", "arguments": {"a": 2}}'
    _, choice, _ = read_text(either, f"<tool_call>{block}</tool_call>")
    assert choice.message.tool_calls == (ToolCall("id0", "bash", '{"a": 1}'),)


UNSENDABLE = [
    ("1" * 5000, ""),
    ("[" * 3000 + "]" * 3000, "[" * 55),
    ("[" * 80 + "]" * 80, "[" * 55),
    ("NaN", ""),
    ("-Infinity", ""),
    ("1e999", ""),
    ('"x\\ud800 y"', '"x'),
]
"""Values that clients, or Python, cannot send back, and how much of them is told."""


@pytest.mark.parametrize(("value", "part"), UNSENDABLE)
def test_arguments_that_no_client_can_send_back_are_told_up_to_there_and_marked(
    either: Any, value: str, part: str
) -> None:
    block = f'{{"name": "bash", "arguments": {{"n": {value}}}}}'
    events, choice, reader = read_text(either, f"I look.<tool_call>{block}</tool_call><|im_end|>")
    assert choice.message == accumulated(events)
    assert [call.arguments for call in choice.message.tool_calls] == [f'{{"n": {part}']
    assert check_arguments(choice.message.tool_calls[0].arguments, "")
    assert (choice.finish, reader.unparsable) == ("stop", True)


@pytest.mark.parametrize(
    "block",
    [
        *(f'{{"arguments": {{"n": {value}}}, "name": "bash"}}' for value, _ in UNSENDABLE),
        f'{{"arguments": {{}}, "name": "{"b" * 257}"}}',
        f'{{"name": "{"b" * 257}", "arguments": {{}}}}',
        '{"name": "bash", "arguments": ["ls"]}',
        '{"name": "bash", "arguments": []}',
        '{"name": "bash", "arguments": "1"}',
    ],
)
def test_a_block_that_no_client_can_send_back_is_text(either: Any, block: str) -> None:
    events, choice, reader = read_text(either, f"I look.<tool_call>{block}</tool_call><|im_end|>")
    assert choice.message == accumulated(events)
    assert choice.message.tool_calls == ()
    assert block in choice.message.text
    assert (choice.finish, reader.unparsable) == ("stop", True)


def test_a_custom_tools_text_comes_whole(either: Any) -> None:
    body = json.dumps({"name": "exec", "arguments": {"input": "print(1)"}})
    events, choice, _ = read_text(either, f"<tool_call>{body}</tool_call>")
    assert [event.arguments for event in events if isinstance(event, ToolCallDelta)] == ["print(1)"]
    assert choice.message.tool_calls == (ToolCall("id0", "exec", "print(1)", "custom"),)
    _, choice, _ = read_text(either, f"<tool_call>{body[:-8]}", "length")
    assert choice.message.tool_calls == ()
    assert "exec" in choice.message.text
