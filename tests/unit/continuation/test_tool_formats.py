"""A template's tool calls are read in the form in which it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rolltap.errors import ConfigError, InvalidRequest
from rolltap.protocols.conversation import (
    Message,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.proxy.continuation.tool_formats import TOOL_FORMATS
from rolltap.types import BreakReason

from .conftest import BASH, World
from .making import (
    CALLED_WITH_ESCAPES,
    DEEPSEEK,
    FUNCTION_GEMMA,
    GEMMA,
    GLM,
    LLAMA,
    PYTHONIC,
    llama_renderer,
    mistral,
    mistral_renderer,
    tokenizer_with,
    trl_template,
)


def user(text: str) -> Message:
    return Message("user", (Text(text),))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return llama_renderer(tmp_path_factory.mktemp("llama"))


def reader(renderer: TemplateRenderer, tools: Any = (BASH,)) -> ReplyParser:
    return ReplyParser(renderer, [], tools, (), lambda at: f"id{at}")


def calls_of(renderer: TemplateRenderer, text: str) -> list[tuple[str, Any]]:
    parsed = renderer.parse(renderer.tokenizer.encode(text), [], (BASH,))
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


@pytest.mark.parametrize(
    ("template", "special", "name"),
    [
        (lambda: trl_template("qwen3"), (), "hermes"),
        (lambda: trl_template("qwen3_5_think"), (), "qwen-xml"),
        (lambda: trl_template("glm4moe"), GLM, "glm"),
        (lambda: trl_template("llama3_1"), LLAMA, "llama"),
        (lambda: trl_template("llama3_2"), LLAMA, "llama"),
        (lambda: mistral("list"), ("[TOOL_CALLS]", "</s>"), "mistral"),
        (lambda: mistral("args"), ("[TOOL_CALLS]", "[ARGS]", "</s>"), "mistral"),
        (lambda: PYTHONIC, (), "pythonic"),
        (lambda: PYTHONIC.replace(" | tojson", "").replace("={{ value }}", '="{{ value }}"'), (), "pythonic"),
        (lambda: CALLED_WITH_ESCAPES, FUNCTION_GEMMA, "function-gemma"),
        (lambda: trl_template("gemma3"), GEMMA, "none"),
    ],
)
def test_the_format_is_what_the_template_writes(
    tmp_path: Path, template: Callable[[], str], special: tuple[str, ...], name: str
) -> None:
    assert TemplateRenderer(tokenizer_with(tmp_path, template(), *special)).tool_format == name


def test_a_declared_format_is_taken_and_an_unknown_one_lists_the_known(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, trl_template("gemma3"), "<start_of_turn>", "<end_of_turn>")
    renderer = TemplateRenderer(tokenizer, "llama")
    assert calls_of(renderer, '{"name": "bash", "parameters": {"command": "ls"}}') == [("bash", {"command": "ls"})]
    with pytest.raises(ConfigError, match=f"'xml'; known: {', '.join(TOOL_FORMATS)}"):
        TemplateRenderer(tokenizer, "xml")


def test_llama_calls_are_read_and_continued_in_the_sampled_tokens(llama: TemplateRenderer) -> None:
    world = World(llama)
    first = world.call(user("list"), output='{"name":  "bash", "parameters": {"command": "ls",   "n": 1.0}}<|eot_id|>')
    assert first.reply is not None
    (call,) = first.reply.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "ls", "n": 1.0})
    echo = Message("assistant", (), (ToolCall("other-id", "bash", '{"n":1,"command":"ls"}'),))
    plan = world.plan(world.request(user("list"), echo, Message("tool", (Text("a.txt"),), tool_call_id=call.id)))
    context = first.context_ids()
    assert plan.break_ is None
    np.testing.assert_array_equal(plan.prompt_ids[: len(context)], context)
    new = llama.tokenizer.decode(plan.prompt_ids[len(context) :].tolist())
    header = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    assert new == f'{header("ipython")}"a.txt"<|eot_id|>{header("assistant")}'


def test_llama_takes_one_call_a_turn_and_says_so(llama: TemplateRenderer) -> None:
    world = World(llama)
    first = world.call(user("list"), output='{"name": "bash", "parameters": {}}<|eot_id|>')
    assert first.reply is not None
    twice = msgspec.structs.replace(first.reply, tool_calls=first.reply.tool_calls * 2)
    assert [result.scenario for result in llama.audit if not result.admitted] == ["parallel_tools"]
    with pytest.raises(InvalidRequest, match="single tool-calls"):
        llama.render([user("list"), twice, user("go on")], (BASH,), thinking=True)
    plan = world.plan(world.request(user("list"), twice, user("go on")))
    assert plan.fitted == ("calls_one_by_one",)
    assert llama.tokenizer.decode(plan.prompt_ids.tolist()).count('{"name": "bash"') == 2


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_a_llama_call_is_no_text(llama: TemplateRenderer, tag: str) -> None:
    parser = reader(llama)
    ids = llama.tokenizer.encode(tag + '{"name": "bash", "parameters": {"command": "ls"}}')
    events = [event for token in ids for event in parser.feed([token])]
    assert events == []
    _, choice = parser.finish("stop")
    assert choice.message.text == ""
    assert [json.loads(call.arguments) for call in choice.message.tool_calls] == [{"command": "ls"}]


@pytest.mark.parametrize("tools", [(BASH,), ()])
@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ("[bash(command='ls -la\\n', n=[1, None], deep={'a': True})]", True),
        ('[bash(command="a\nb"), bash()]', True),
        ("[bash(command='ls')] and more", False),
        ("[1, 2]", False),
        ("[see above](link)", False),
        ("Well: [bash(command='ls')]", False),
    ],
)
def test_a_python_list_of_calls_is_the_whole_reply(tmp_path: Path, text: str, is_call: bool, tools: Any) -> None:
    renderer = TemplateRenderer(tokenizer_with(tmp_path, PYTHONIC))
    parser = reader(renderer, tools)
    for token in renderer.tokenizer.encode(text):
        parser.feed([token])
    _, choice = parser.finish("stop")
    names = [call.name for call in choice.message.tool_calls]
    assert names == (["bash"] * text.count("bash(") if is_call and tools else [])
    assert choice.message.text == ("" if names else text)
    assert parser.unparsable == (text.endswith("more") and bool(tools))


@pytest.mark.parametrize("text", ["An object {like this} is no call.", '{"colour": "red"}', "{oh"])
def test_llama_text_is_text_and_streams_if_it_is_no_object(llama: TemplateRenderer, text: str) -> None:
    parser = reader(llama)
    streamed = parser.feed(llama.tokenizer.encode(text))
    last, choice = parser.finish("stop")
    assert "".join(event.text for event in [*streamed, *last] if isinstance(event, TextDelta)) == text
    assert choice.message.text == text
    assert choice.message.tool_calls == ()
    assert bool(streamed) == (not text.startswith("{"))


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "a", "arguments": {"n": 1}}, {"name": "b", "arguments": {}, "id": "x"}]',
        'Well.[TOOL_CALLS]a[ARGS]{"n": 1}[TOOL_CALLS]b[ARGS]{}',
        '[TOOL_CALLS]a[CALL_ID]123456789[ARGS]{"n": 1}[TOOL_CALLS]b[ARGS]{}',
    ],
)
def test_mistral_calls(tmp_path: Path, text: str) -> None:
    special = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>")
    renderer = TemplateRenderer(tokenizer_with(tmp_path, mistral("args"), *special))
    assert calls_of(renderer, text) == [("a", {"n": 1}), ("b", {})]


def test_a_mistral_call_that_can_not_be_read_is_seen_and_marked(tmp_path: Path) -> None:
    renderer = TemplateRenderer(tokenizer_with(tmp_path, mistral("args"), "[TOOL_CALLS]", "[ARGS]", "</s>"))
    parser = reader(renderer)
    parser.feed(renderer.tokenizer.encode("[TOOL_CALLS]bash[ARGS]broken"))
    _, choice = parser.finish("stop")
    assert choice.message.tool_calls == ()
    assert "[ARGS]broken" in choice.message.text
    assert parser.unparsable


@pytest.mark.parametrize("size", [1, 3, 99])
def test_mistral_calls_stream_their_arguments_and_end_where_the_next_begins(tmp_path: Path, size: int) -> None:
    renderer = TemplateRenderer(tokenizer_with(tmp_path, mistral("args"), "[TOOL_CALLS]", "[ARGS]", "</s>"))
    parser = reader(renderer)
    ids = renderer.tokenizer.encode('Well.[TOOL_CALLS]bash[ARGS]{"n":  1}[TOOL_CALLS]bash[ARGS]{"m": 2, "o": 34')
    events = [event for at in range(0, len(ids), size) for event in parser.feed(ids[at : at + size])]
    last, choice = parser.finish("length")
    told = [type(event) for event in events if not isinstance(event, ToolCallDelta | TextDelta)]
    assert told == [ToolCallStarted, ToolCallEnded, ToolCallStarted]
    assert [type(event) for event in last] == [ToolCallEnded]
    assert [call.arguments for call in choice.message.tool_calls] == ['{"n":  1}', '{"m": 2, "o": ']
    for position, call in enumerate(choice.message.tool_calls):
        deltas = [event for event in events if isinstance(event, ToolCallDelta) and event.position == position]
        assert "".join(delta.arguments for delta in deltas) == call.arguments


def test_the_hermes_form_without_its_tokens_is_text(llama: TemplateRenderer) -> None:
    text = '<tool_call>{"name": "bash", "arguments": {}}</tool_call>'
    ids = llama.tokenizer.encode(llama.tokenizer.guard(text))
    assert calls_of(llama, text) == []
    assert llama.parse(ids, [], (BASH,)).text == text


def test_unbridgeable_roles_still_render_whole(llama: TemplateRenderer) -> None:
    world = World(llama)
    first = world.call(user("list"), output='{"name": "bash", "parameters": {}}<|eot_id|>')
    assert first.reply is not None
    results = [Message("tool", (Text(text),), tool_call_id=first.reply.tool_calls[0].id) for text in ("a", "b")]
    plan = world.plan(world.request(user("list"), first.reply, *results))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.TEMPLATE_NOT_BRIDGEABLE


@pytest.mark.parametrize(
    "first", ['[{"name": "a", "arguments": {"n": 1}}]', 'exec[ARGS]{"input": "ls"}', "a[ARGS]broken"]
)
def test_a_mistral_call_that_comes_whole_keeps_its_place_before_one_that_streams(tmp_path: Path, first: str) -> None:
    renderer = TemplateRenderer(tokenizer_with(tmp_path, mistral("args"), "[TOOL_CALLS]", "[ARGS]", "</s>"))
    parser = reader(renderer, (BASH, Tool("exec", "", None, "custom")))
    ids = renderer.tokenizer.encode(f'[TOOL_CALLS]{first}[TOOL_CALLS]bash[ARGS]{{"m": 2}}')
    events = [event for token in ids for event in parser.feed([token])]
    last, choice = parser.finish("stop")
    wanted = {"[": [("a", '{"n": 1}')], "e": [("exec", "ls")], "a": []}[first[0]]
    calls = choice.message.tool_calls
    assert [(call.name, call.arguments) for call in calls] == [*wanted, ("bash", '{"m": 2}')]
    started = [event.name for event in [*events, *last] if isinstance(event, ToolCallStarted)]
    assert started == [call.name for call in calls]
    assert ("broken" in choice.message.text) == (wanted == [])


FINE, BAD, WORSE = (f'{{"name": "bash", "arguments": {arguments}}}' for arguments in ('{"a": 1}', '{"a": NaN}', "[]"))


@pytest.mark.parametrize("size", [1, 99])
@pytest.mark.parametrize(
    ("sections", "max_calls", "calls", "shown"),
    [
        ([[FINE, FINE]], 0, 0, [0]),
        ([[FINE, FINE]] * 2, 0, 0, [0, 1]),
        ([[FINE, BAD, WORSE]], 128, 1, [0]),
        ([[FINE], [BAD, FINE, WORSE], [FINE, FINE], [BAD]], 128, 4, [1, 3]),
    ],
)
def test_a_mistral_list_is_shown_once(
    tmp_path: Path, sections: list[list[str]], max_calls: int, calls: int, shown: list[int], size: int
) -> None:
    """A list is text if one of its calls is none."""
    renderer = mistral_renderer(tmp_path, "list")
    parser = reader(renderer)
    parser.max_calls = max_calls
    texts = [f"[TOOL_CALLS][{', '.join(section)}]" for section in sections]
    ids = renderer.tokenizer.encode("".join(["Well.", *texts]))
    events = [event for at in range(0, len(ids), size) for event in parser.feed(ids[at : at + size])]
    last, choice = parser.finish("stop")
    assert "".join(event.text for event in [*events, *last] if isinstance(event, TextDelta)) == choice.message.text
    assert choice.message.text == "Well." + "".join(texts[at] if at in shown else "\n" for at in range(shown[-1] + 1))
    assert len(choice.message.tool_calls) == calls


def test_a_mistral_argument_may_speak_of_calls(tmp_path: Path) -> None:
    """`[TOOL_CALLS]` in ordinary tokens begins no block."""
    renderer = mistral_renderer(tmp_path, "args")
    guarded = renderer.tokenizer.guard('{"a": "[TOOL_CALLS]x"}')
    assert calls_of(renderer, f"[TOOL_CALLS]bash[ARGS]{guarded}") == [("bash", {"a": "[TOOL_CALLS]x"})]


DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{}\n```<｜tool▁call▁end｜>".format


@pytest.mark.parametrize("size", [1, 99])
@pytest.mark.parametrize("first", [[], ['{"a": 1}'], ['{"a": 1}', '{"b": 2}']])
def test_each_section_of_deepseek_calls_is_read(tmp_path: Path, first: list[str], size: int) -> None:
    renderer = TemplateRenderer(tokenizer_with(tmp_path, trl_template("qwen3"), *DEEPSEEK), "deepseek")
    sections = ["".join(map(DEEPSEEK_CALL, section)) for section in (first, ['{"c": 3}'])]
    ids = renderer.tokenizer.encode("Well." + "\n".join(f"{DEEPSEEK[0]}{calls}{DEEPSEEK[1]}" for calls in sections))
    parser = reader(renderer)
    events = [event for at in range(0, len(ids), size) for event in parser.feed(ids[at : at + size])]
    last, choice = parser.finish("stop")
    assert [call.arguments for call in choice.message.tool_calls] == [*first, '{"c": 3}']
    started = [event for event in [*events, *last] if isinstance(event, ToolCallStarted)]
    assert len(started) == len(choice.message.tool_calls)
    assert (choice.message.text, choice.finish, parser.unparsable) == ("Well.", "tool_calls", False)


def test_a_deepseek_section_with_a_call_that_can_not_be_read_is_text(tmp_path: Path) -> None:
    """And so is a section that holds something else than calls."""
    renderer = TemplateRenderer(tokenizer_with(tmp_path, trl_template("qwen3"), *DEEPSEEK), "deepseek")
    mixed = "".join((DEEPSEEK[0], DEEPSEEK_CALL('{"a": NaN}'), DEEPSEEK_CALL('{"b": 2}'), DEEPSEEK[1]))
    parser = reader(renderer)
    junk = f"{DEEPSEEK[0]}junk{DEEPSEEK[1]}"
    parser.feed(renderer.tokenizer.encode(junk + mixed))
    _, choice = parser.finish("stop")
    assert choice.message.text == junk + mixed
    assert [call.arguments for call in choice.message.tool_calls] == ['{"b": 2}']
    assert parser.unparsable
