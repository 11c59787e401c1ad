"""A model may sample any JSON where a tool call should stand; a reply is made of it all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rolltap.proxy.continuation.json_calls import is_arguments
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.proxy.conversation.chat import ToolCallStarted

from .conftest import BASH
from .making import LLAMA, tokenizer_with, trl_template
from .test_tool_formats import mistral

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
