"""What is streamed is what was sampled: whole characters, no stop string, and never more than the reply says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.protocols.conversation import (
    Message,
    ReasoningDelta,
    Text,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolCallStarted,
)
from rolltap.protocols.handles import MAX_CALLS
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.template import TemplateRenderer

from .making import glm_family, tokenizer_with, trl_template

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
    assert choice.message.text == tokenizer.decode(ids[:-1])


@PROPERTY
@given(ids=st.lists(st.integers(0, 900), max_size=40), sizes=st.lists(st.integers(1, 5), max_size=30))
def test_any_tokens_at_all_give_a_consistent_reply(family: Any, ids: list[int], sizes: list[int]) -> None:
    events, choice = run(parser(family), list(ids), sizes)
    assert text_of(events) == choice.message.text
    assert text_of(events, ReasoningDelta) == choice.message.reasoning
    started = [event.name for event in events if isinstance(event, ToolCallStarted)]
    assert started == [call.name for call in choice.message.tool_calls]


def test_a_call_in_xml_comes_when_its_block_is_closed(tmp_path: Path) -> None:
    renderer = TemplateRenderer(tokenizer_with(tmp_path, trl_template("qwen3_5_think")))
    block = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    ids = renderer.tokenizer.encode(f"Look.\n\n{block}")
    reader = parser(renderer)
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


GLM_CALL = "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"


@pytest.mark.parametrize("family", ["glm-4.5", "glm-5"])
@pytest.mark.parametrize("after", ["", GLM_CALL])
@pytest.mark.parametrize(("thinking", "opens"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_prompt_and_the_reply_decide_what_is_thinking(
    tmp_path: Path, family: str, thinking: bool, opens: bool, after: str
) -> None:
    """GLM-4.5 leaves the opening tag to the reply, GLM-5's prompt has it."""
    renderer = glm_family(tmp_path, family)
    prompt = renderer.render([Message("user", (Text("q"),))], (BASH,), thinking=thinking)
    in_prompt = renderer.tokenizer.decode(prompt).endswith("<think>")
    assert in_prompt == (thinking and family == "glm-5")
    thought = "hm</think>" if in_prompt else "<think>hm</think>" if opens else ""
    ids = renderer.tokenizer.encode(f"{thought}Hello.{after}") + [renderer.stop_token_ids[0]]
    events, choice = run(ReplyParser(renderer, prompt, (BASH,), (), lambda at: f"id{at}"), ids, [])
    assert text_of(events, ReasoningDelta) == choice.message.reasoning == ("hm" if thought else "")
    assert text_of(events) == choice.message.text == "Hello."
    assert len(choice.message.tool_calls) == bool(after)


DRAFT = '<tool_call>\n{"name": "bash", "arguments": {"command": "rm"}}\n</tool_call>'
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.mark.parametrize("after", ["Better not.", CALL])
def test_a_call_drafted_while_thinking_is_never_made(either: Any, after: str) -> None:
    ids = either.tokenizer.encode(f"<think>\nperhaps {DRAFT} no\n</think>\n\n{after}") + [either.stop_token_ids[0]]
    events, choice = run(parser(either), ids, [])
    assert text_of(events, ReasoningDelta) == choice.message.reasoning == f"perhaps {DRAFT} no"
    assert [call.arguments for call in choice.message.tool_calls] == (['{"command": "ls"}'] if after == CALL else [])
    assert text_of(events) == choice.message.text == ("" if after == CALL else after)


def test_a_call_ends_thinking_that_nothing_closes(either: Any) -> None:
    events, choice = run(parser(either), either.tokenizer.encode(f"<think>\nlook first\n{CALL}"), [])
    assert text_of(events, ReasoningDelta) == choice.message.reasoning == "look first"
    assert [call.arguments for call in choice.message.tool_calls] == ['{"command": "ls"}']


def test_tags_spelt_in_ordinary_tokens_are_text(either: Any) -> None:
    said = f"<think> is a tag, and so is {CALL}"
    ids = either.tokenizer.encode(either.tokenizer.guard(said)) + [either.stop_token_ids[0]]
    events, choice = run(parser(either), ids, [])
    assert text_of(events) == choice.message.text == said
    assert (choice.message.reasoning, choice.message.tool_calls) == ("", ())


def test_a_call_may_speak_of_calls(either: Any) -> None:
    """`<tool_call>` within an argument, in ordinary tokens: part of the argument, in the reply and in its echo."""
    arguments = {"command": "grep '</tool_call>' <tool_call> <|im_end|>"}
    guarded = either.tokenizer.guard(json.dumps({"name": "bash", "arguments": arguments}))
    ids = either.tokenizer.encode(f"<tool_call>\n{guarded}\n</tool_call>") + [either.stop_token_ids[0]]
    _, choice = run(parser(either), ids, [])
    assert [json.loads(call.arguments) for call in choice.message.tool_calls] == [arguments]
    question = Message("user", (Text("q"),))
    before = either.render([question], (BASH,), thinking=True)
    after = either.render([question, choice.message], (BASH,), thinking=True)
    marker = either.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert after.count(marker) - before.count(marker) == 1
    assert either.tokenizer.decode(after).count("<tool_call> <|im_end|>") == 1


@pytest.mark.parametrize("ends", [True, False])
def test_an_empty_generation_is_an_empty_reply(either: Any, ends: bool) -> None:
    events, choice = run(parser(either), [either.stop_token_ids[0]] if ends else [], [])
    assert events == []
    assert choice.message == Message("assistant")


def test_a_custom_tool_gets_free_text(family: Any) -> None:
    tool = Tool("exec", "", None, "custom")
    body = json.dumps({"name": "exec", "arguments": {"input": "print(1)"}})
    ids = family.tokenizer.encode(f"<tool_call>\n{body}\n</tool_call>") + [family.stop_token_ids[0]]
    _, choice = run(parser(family, tools=(tool,)), ids, [])
    assert choice.message.tool_calls[0].arguments == "print(1)"
    assert choice.message.tool_calls[0].kind == "custom"


BROKEN = "<tool_call>\n{broken\n</tool_call>"


@pytest.mark.parametrize(
    "block",
    [CALL, BROKEN, f"between {CALL}", f"{CALL} so\n\nSTOP ", f"{BROKEN} STOP ", f"{BROKEN}\n", f"{BROKEN} a\n\nb "],
)
@pytest.mark.parametrize("stop", [(), ("never", "\n\n"), ("STOP",)])
def test_the_work_for_a_reply_of_many_blocks_is_linear(
    either: Any, block: str, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is done on the event loop, which other sessions share."""
    parsed: list[int] = []
    read_block = either.read_block

    def counted(block: list[int], *others: Any) -> Any:
        parsed.append(len(block))
        return read_block(block, *others)

    monkeypatch.setattr(either, "read_block", counted)
    ids = either.tokenizer.encode(block) * MAX_CALLS + [either.stop_token_ids[0]]
    _, choice = run(parser(either, stop), ids, [16] * len(ids))
    is_stopped = any(string in block.replace(CALL, "") for string in stop)
    assert len(choice.message.tool_calls) == (0 if CALL not in block else 1 if is_stopped else MAX_CALLS)
    assert sum(parsed) <= len(ids)


@pytest.mark.parametrize(
    ("before", "thinking"),
    [("<think>hm ", "hm"), (f"<think>{CALL}</think>", CALL), ("<think>hm</think>ok <|im_start|>", "hm")],
)
@pytest.mark.parametrize("max_calls", [1, 2, MAX_CALLS])
def test_surplus_calls_that_come_with_the_end_are_not_on_record(
    either: Any, before: str, thinking: str, max_calls: int
) -> None:
    """Otherwise they stand in each later prompt, and no client saw them."""
    encode = either.tokenizer.encode
    after = "<|im_start|>" if before.endswith("</think>") else ""
    kept = encode(before + after) + encode(CALL) * max_calls
    reader = parser(either)
    reader.max_calls = max_calls
    events, choice = run(reader, kept + encode(BROKEN) + encode(CALL) * 12 + [either.stop_token_ids[0]], [])
    assert len(choice.message.tool_calls) == max_calls
    assert sum(isinstance(event, ToolCallStarted) for event in events) == max_calls
    assert (choice.message.reasoning, choice.finish) == (thinking, "tool_calls")
    assert reader.consumed == len(kept)
    assert reader.unparsable == (max_calls == MAX_CALLS)


@pytest.mark.parametrize("between", ["", " and "])
def test_a_surplus_call_ends_the_reply_and_is_marked(either: Any, between: str) -> None:
    ids = either.tokenizer.encode(CALL + between) * 1100
    reader = parser(either)
    events = [event for at in range(0, len(ids), 50) for event in reader.feed(ids[at : at + 50])]
    assert reader.over
    last, choice = reader.finish("stop")
    started = [event for event in [*events, *last] if isinstance(event, ToolCallStarted)]
    assert len(started) == len(choice.message.tool_calls) == MAX_CALLS
    assert reader.unparsable
    assert choice.finish == "tool_calls"
    assert reader.consumed == MAX_CALLS * len(ids) // 1100


def test_a_second_call_that_the_client_refused_is_no_broken_one(either: Any) -> None:
    reader = parser(either)
    reader.max_calls = 1
    reader.feed(either.tokenizer.encode(CALL + CALL))
    assert reader.over
    assert reader.feed(either.tokenizer.encode(CALL)) == reader.feed(either.tokenizer.encode("more")) == []
    _, choice = reader.finish("stop")
    assert len(choice.message.tool_calls) == 1
    assert not reader.unparsable
    assert reader.consumed == len(either.tokenizer.encode(CALL))


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_text_after_a_broken_block_is_in_the_reply(either: Any, stop: tuple[str, ...]) -> None:
    """A reply's text is sent as it was sampled, in its order."""
    ids = either.tokenizer.encode(f"Look. {BROKEN}\n\n{CALL}\nAnd {BROKEN} so.\n") + [either.stop_token_ids[0]]
    events, choice = run(parser(either, stop), ids, [])
    assert text_of(events) == choice.message.text == f"Look. {BROKEN}\nAnd {BROKEN} so.\n"
    assert len(choice.message.tool_calls) == 1
