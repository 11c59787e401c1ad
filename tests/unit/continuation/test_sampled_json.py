"""A model may sample any JSON where a tool call should stand; a reply is made of it all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rolltap.protocols.conversation import TextDelta, ToolCallStarted
from rolltap.proxy.continuation.json_calls import is_arguments
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.template import TemplateRenderer

from .conftest import BASH
from .making import LLAMA, mistral, tokenizer_with, trl_template

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8) | st.just("bash"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FORMS: dict[str, tuple[Callable[[], str], tuple[str, ...], str]] = {
    "hermes": (lambda: trl_template("qwen3"), (), "<tool_call>\n%s\n</tool_call>"),
    "llama": (lambda: trl_template("llama3_1"), LLAMA, "%s"),
    "mistral": (lambda: mistral("list"), ("[TOOL_CALLS]", "</s>"), "[TOOL_CALLS][%s]"),
}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    template, special, text = FORMS[request.param]
    return TemplateRenderer(tokenizer_with(tmp_path_factory.mktemp("form"), template(), *special)), text


@pytest.mark.parametrize("deep", ["[" * 3_000, "[" * 3_000 + "]" * 3_000, '{"a":' * 3_000 + "1" + "}" * 3_000])
def test_json_deeper_than_python_reads_is_text(form: tuple[Any, str], deep: str) -> None:
    renderer, text = form
    ids = renderer.tokenizer.encode(text % f'{{"name": "bash", "arguments": {deep}, "parameters": {deep}}}')
    parser = ReplyParser(renderer, [], (BASH,), (), lambda at: f"id{at}")
    for at in range(0, len(ids), 1_000):
        parser.feed(ids[at : at + 1_000])
    _, choice = parser.finish("stop")
    assert choice.message.tool_calls or choice.message.text


UNREADABLE = ["1" * 5_000, "[" * 3_000 + "]" * 3_000]
"""Values that Python's JSON parser fails on."""

GOOD = '<tool_call>{"name": "bash", "arguments": {"command": "a"}}</tool_call>'


@pytest.mark.parametrize("size", [1, 16, 10_000])
@pytest.mark.parametrize("thinking", ["", "<think>hm</think>", f"<think>hm {GOOD} </think>", "<think>hm "])
@pytest.mark.parametrize("value", UNREADABLE)
def test_a_block_that_python_cannot_read_is_text_beside_the_calls(
    either: Any, value: str, thinking: str, size: int
) -> None:
    block = f'<tool_call>{{"arguments": {{"n": {value}}}, "name": "bash"}}</tool_call>'
    said = "" if thinking == "<think>hm " else "I look."
    ids = either.tokenizer.encode(f"{thinking}{said}{GOOD}{block}{GOOD}<|im_end|>")
    parser = ReplyParser(either, [], (BASH,), (), lambda at: f"id{at}")
    events = [event for at in range(0, len(ids), size) for event in parser.feed(ids[at : at + size])]
    last, choice = parser.finish("stop")
    assert "".join(event.text for event in [*events, *last] if isinstance(event, TextDelta)) == choice.message.text
    assert choice.message.text == f"{said}\n{block}".strip()
    assert [call.arguments for call in choice.message.tool_calls] == ['{"command": "a"}'] * 2
    assert choice.message.reasoning == thinking.replace("<think>", "").replace("</think>", "").strip()
    assert (choice.finish, parser.unparsable) == ("tool_calls", True)


@pytest.mark.parametrize("value", UNREADABLE)
def test_a_streamed_call_that_python_cannot_read_leaves_the_others_complete(either: Any, value: str) -> None:
    block = f'<tool_call>{{"name": "bash", "arguments": {{"n": {value}}}}}</tool_call>'
    parser = ReplyParser(either, [], (BASH,), (), lambda at: f"id{at}")
    parser.feed(either.tokenizer.encode(f"{block}{GOOD}<|im_end|>"))
    _, choice = parser.finish("stop")
    begun, complete = (call.arguments for call in choice.message.tool_calls)
    assert begun.startswith('{"n": ')
    assert complete == '{"command": "a"}'
    assert (choice.message.text, choice.finish, parser.unparsable) == ("", "tool_calls", True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=JSON, arguments=JSON, key=st.sampled_from(["arguments", "parameters"]), size=st.integers(1, 9))
@example(name={"name": "bash"}, arguments={}, key="arguments", size=9)
@example(name=["bash"], arguments=[], key="parameters", size=1)
@example(name="\ud800", arguments={"\ud800": "\udfff"}, key="arguments", size=3)
def test_any_json_makes_a_reply(form: tuple[Any, str], name: Any, arguments: Any, key: str, size: int) -> None:
    renderer, text = form
    ids = renderer.tokenizer.encode(text % json.dumps({"name": name, key: arguments}))
    parser = ReplyParser(renderer, [], (BASH,), (), lambda at: f"id{at}")
    events = [event for at in range(0, len(ids), size) for event in parser.feed(ids[at : at + size])]
    last, choice = parser.finish("stop")
    for call in choice.message.tool_calls:
        assert isinstance(call.name, str)
        assert call.name
        assert parser.unparsable or is_arguments(call.arguments)
        f"{call.name}{call.arguments}".encode()  # what clients are sent is UTF-8
    started = [event.name for event in [*events, *last] if isinstance(event, ToolCallStarted)]
    assert started == [call.name for call in choice.message.tool_calls]
