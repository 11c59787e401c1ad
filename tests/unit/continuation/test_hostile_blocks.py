"""Replies and templates that are made to take long, to end the reader with an error, or to be read as other calls."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import pytest

from rolltap.errors import ConfigError
from rolltap.protocols.conversation import Message, Tool
from rolltap.proxy.continuation.block_formats import CallBlock, checked_calls, read_minimax, read_qwen_xml
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.template import LEARNED, TemplateRenderer
from rolltap.proxy.continuation.tool_formats import IdIndex
from rolltap.tokenizer import HubTokenizer

from .making import fed, tokenizer_with
from .test_learned_formats import TURNS

TOOLS = (Tool("bash", "", {"type": "object", "properties": {"text": {"type": "string"}, "more": {}}}),)
ARGUMENTS = "{{ c.function.arguments | tojson }}"
EACH = "{% for k, v in c.function.arguments.items() %}"
JSON = ("[calls]\n[", '{"name": "{{ c.function.name }}", "kwargs": ' + ARGUMENTS + "}", ", ", "]\n[/calls]")
NAME_IS_KEY = ("[calls]", "{ {{ c.function.name | tojson }}: " + ARGUMENTS + "}", ", ", "[/calls]")
WITH_ID = (
    "[calls]",
    '{"id": "{{ c.id }}", "fn": "{{ c.function.name }}", "kwargs": ' + ARGUMENTS + "}",
    "",
    "[/calls]",
)
MARKED = (
    "[calls]",
    f"<c>{{{{ c.function.name }}}}{EACH}<k>{{{{ k }}}}</k><v>{{{{ v }}}}</v>{{% endfor %}}</c>",
    "",
    "[/calls]",
)
ELEMENTS = (
    "[calls]",
    f"<fn={{{{ c.function.name }}}}>{EACH}<arg={{{{ k }}}}>{{{{ v }}}}</arg>{{% endfor %}}</fn>",
    "",
    "[/calls]",
)


def template(form: tuple[str, str, str, str], thinking: tuple[str, str] = ("<think>", "</think>")) -> str:
    opening, row, between, closing = form
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.reasoning_content %}}{thinking[0]}{{{{ m.reasoning_content }}}}{thinking[1]}\n{{% endif %}}"
        f"{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{opening}{{% for c in m.tool_calls %}}{row}"
        f"{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{closing}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def renderer_of(folder: Path, form: tuple[str, str, str, str], *tokens: str) -> TemplateRenderer:
    thinking = (tokens[0], tokens[1]) if tokens else ("<think>", "</think>")
    renderer = TemplateRenderer(tokenizer_with(folder, template(form, thinking), *tokens))
    assert renderer.tool_format == LEARNED
    return renderer


def seen(renderer: TemplateRenderer, text: str, tools: tuple[Tool, ...] = TOOLS) -> list[tuple[str, str, bool]]:
    parsed = renderer.parse(renderer.tokenizer.encode(text), [], tools)
    return [(call.name, call.arguments, call.ok) for call in parsed.tool_calls]


def assert_linear(read: Callable[[str], object], text_of: Callable[[int], str], count: int) -> None:
    """Four times the input takes under ten times as long; with quadratic work it takes sixteen times.

    In CPU seconds of this thread. What is not far below is measured three times.
    """

    def seconds(text: str) -> float:
        begin = time.thread_time()
        read(text)
        return time.thread_time() - begin

    short, long = text_of(count), text_of(4 * count)
    few, many = seconds(short), seconds(long)
    for _ in range(2):
        if many > 8 * max(few, 0.002):
            few, many = min(few, seconds(short)), min(many, seconds(long))
    assert many < 10 * max(few, 0.002)


@pytest.mark.parametrize(
    ("form", "text_of"),
    [
        (MARKED, lambda n: "[calls]<c>bash<k>text</k><v>x[/calls]" * n),
        (ELEMENTS, lambda n: "[calls]<fn=bash><arg=text>x[/calls]" * n),
        (ELEMENTS, lambda n: "[calls]<fn=bash><arg=text>" + "</fn>" * 8 * n),
        (JSON, lambda n: '[calls]\n[{"name": "bash", "kwargs": {}}]\n[/calls]' * n),
        (JSON, lambda n: "[calls]" + " " * 9 * n),
    ],
    ids=["marked", "elements", "closing tags", "calls", "white space"],
)
def test_blocks_in_text_take_linear_time(
    form: tuple[str, str, str, str], text_of: Callable[[int], str], tmp_path: Path
) -> None:
    renderer = renderer_of(tmp_path, form)
    assert_linear(lambda text: renderer.parse(renderer.tokenizer.encode_as_is(text), [], TOOLS), text_of, 4000)


def test_a_block_of_many_calls_takes_linear_time_and_memory(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, TURNS.replace("END", "<|im_end|>\n"))
    call = '<invoke name="bash"><parameter name="text">x</parameter></invoke>'
    block = CallBlock(tokenizer, tokenizer.encode(call * 300), TOOLS)
    calls = checked_calls(read_minimax, block) or ()
    assert len(calls) == 300
    assert len({id(call.raw) for call in calls}) == 1, "each call has a copy of the block's text"


def test_values_without_line_breaks_take_linear_time(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, TURNS.replace("END", "<|im_end|>\n"))

    def text_of(count: int) -> str:
        values = "".join(f"<parameter=z{at}>\nx</parameter>\n" for at in range(count))
        return f"<function=bash>\n{values}</function>"

    def read(text: str) -> None:
        calls = checked_calls(read_qwen_xml, CallBlock(tokenizer, (), TOOLS, written=text))
        assert calls is not None
        assert [call.ok for call in calls] == [True]
        assert set(json.loads(calls[0].arguments).values()) == {"x"}

    assert_linear(read, text_of, 600)


class Windowed(HubTokenizer):
    """As if a token's text depended on the tokens before it; counts the decoded ids."""

    decoded = 0

    def text_stream(self) -> None:
        return None

    def decode(self, token_ids: object, *more: bool, **named: object) -> str:
        self.decoded += 1 if isinstance(token_ids, int) else len(list(token_ids))  # type: ignore[arg-type]
        return super().decode(token_ids, *more, **named)  # type: ignore[arg-type]


def test_the_ids_of_characters_are_found_in_passes_over_parts(tmp_path: Path) -> None:
    known = tokenizer_with(tmp_path, TURNS.replace("END", "<|im_end|>\n"))
    tokenizer = Windowed(tmp_path)
    ids = known.encode("naïve 🙂 'quoted' text, " * 200)
    ends = [len(known.decode(ids[: count + 1])) for count in range(len(ids))]
    index, places = IdIndex(tokenizer, ids), range(0, ends[-1] + 1, 7)
    assert [index.of(place) for place in places] == [bisect_right(ends, place) for place in places]
    assert tokenizer.decoded < 60 * len(ids)


@pytest.mark.parametrize("space", ["\n", "", " ", "\n\n"])
def test_white_space_within_an_opening_is_the_model_s_choice(space: str, tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, JSON)
    text = f'[calls]{space}[{{"name": "bash", "kwargs": {{}}}}]{space}[/calls]'
    assert seen(renderer, text) == [("bash", "{}", True)]


@pytest.mark.parametrize(
    "inner",
    [
        "<k>text</k><v>1<k>more</k><v>2</v>",
        "<k>text</k><v>1</v><k>more</k><v>2",
        "<k>text</k><v>1</v><k>text</k><v>2</v>",
    ],
)
def test_a_tag_that_the_model_forgot_moves_no_text_between_values(inner: str, tmp_path: Path) -> None:
    found = seen(renderer_of(tmp_path, MARKED), f"[calls]<c>bash{inner}</c>[/calls]")
    assert [ok for _, _, ok in found] == [False]


@pytest.mark.parametrize(
    ("form", "block"),
    [
        (JSON, '[calls]\n[{"name": "bash", "kwargs": {"text": "x"}}]\n[/calls]'),
        (NAME_IS_KEY, '[calls]{ "bash": {"text": "x"}}[/calls]'),
        (WITH_ID, '[calls]{"id": "c1", "fn": "bash", "kwargs": {"text": "x"}}[/calls]'),
        (MARKED, "[calls]<c>bash<k>text</k><v>x</v></c>[/calls]"),
        (ELEMENTS, "[calls]<fn=bash><arg=text>x</arg></fn>[/calls]"),
    ],
)
def test_a_call_behind_text_that_speaks_of_calls_is_read(
    form: tuple[str, str, str, str], block: str, tmp_path: Path
) -> None:
    renderer = renderer_of(tmp_path, form)
    for said in ("[calls]", "[calls]!", "[calls] begins a call.\n", f"{form[0]} and {form[0]} again: "):
        calls = seen(renderer, f"As you know, {said}{block}")
        assert [json.loads(arguments) for _, arguments, ok in calls if ok] == [{"text": "x"}], said


def test_a_call_within_a_broken_one_is_none(tmp_path: Path) -> None:
    """A file's text may hold a call that the model did not mean."""
    inner = "[calls]<fn=bash><arg=text>x</arg></fn>[/calls]"
    found = seen(renderer_of(tmp_path, ELEMENTS), f"[calls]<fn=write><arg=text>{inner}")
    assert [ok for _, _, ok in found] == [False]


def test_a_declared_value_may_hold_tags_of_no_parameter(tmp_path: Path) -> None:
    text = "[calls]<c>bash<k>text</k><v>a <k>other</k><v> b</v></c>[/calls]"
    assert seen(renderer_of(tmp_path, MARKED), text) == [("bash", '{"text": "a <k>other</k><v> b"}', True)]


def test_a_name_that_is_a_key_is_decoded_once(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, NAME_IS_KEY)
    assert seen(renderer, '[calls]{"a\\\\nb": {}}[/calls]', (Tool("a\\nb"),)) == [("a\\nb", "{}", True)]


def test_an_id_of_half_a_character_is_no_id(tmp_path: Path) -> None:
    text = '[calls]{"id": "a\\ud800", "fn": "bash", "kwargs": {}}[/calls]'
    assert [ok for _, _, ok in seen(renderer_of(tmp_path, WITH_ID), text)] == [False]


@pytest.mark.parametrize("opening", ["<|think|>", "<|extended_thinking|>", "◁think▷", "<|thinking|>", "[THINK]"])
def test_thinking_tags_with_a_slash(opening: str, tmp_path: Path) -> None:
    mark = next(at for at, character in enumerate(opening) if character.isalpha())
    closing = f"{opening[:mark]}/{opening[mark:]}"
    renderer = renderer_of(tmp_path, JSON, opening, closing)
    parsed = renderer.parse(renderer.tokenizer.encode(f"{opening}hm{closing}hi"), [], TOOLS)
    assert (parsed.reasoning, parsed.text) == ("hm", "hi")


def test_unclosed_thinking_ends_at_a_call_in_text(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, JSON, "<think>", "</think>")
    text = '<think>hm\n\n[calls]\n[{"name": "bash", "kwargs": {}}]\n[/calls]'
    parsed = renderer.parse(renderer.tokenizer.encode(text), [], TOOLS)
    assert [(call.name, call.ok) for call in parsed.tool_calls] == [("bash", True)]
    assert parsed.reasoning == "hm"


@pytest.mark.parametrize(
    "expression",
    ["'[' * 100000", "'{\"a\":' * 100000", "1 // 0", "self.__dict__['x']", "1.0 ** 'a'"],
)
def test_a_template_that_fails_on_calls_teaches_none(expression: str, tmp_path: Path) -> None:
    source = template(WITH_ID).replace("[calls]", "{{ " + expression + " }}[calls]")
    TemplateRenderer(tokenizer_with(tmp_path, source)).render([Message("user", ())], (), thinking=True)


def test_a_template_that_fails_as_it_is_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        TemplateRenderer(tokenizer_with(tmp_path, "{{ 10 ** 5000 }}"))


def test_a_template_without_end_is_refused(tmp_path: Path) -> None:
    source = template(WITH_ID).replace("[calls]", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}[calls]")
    assert TemplateRenderer(tokenizer_with(tmp_path, source)).tool_format == "none"


def test_what_ends_only_the_conversation_ends_no_turn(tmp_path: Path) -> None:
    """Phi-3 writes its end of text behind the last turn; without a `generation_config.json` turns end with another."""
    source = TURNS.replace("END", "<|end|>\n").replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    tokens = ("<|end|>", "<|endoftext|>")
    renderer = TemplateRenderer(tokenizer_with(tmp_path, source, *tokens, eos_token="<|endoftext|>"))
    assert {renderer.tokenizer.token(stop) for stop in renderer.stop_token_ids} == set(tokens)
    assert "user" in [result.scenario for result in renderer.audit if result.admitted]


def test_what_a_template_writes_before_a_turn_s_end_is_no_text(tmp_path: Path) -> None:
    """Command R7B ends its text with one token and its turn with the next."""
    renderer = TemplateRenderer(
        tokenizer_with(tmp_path, TURNS.replace("END", "<|end_text|><|im_end|>"), "<|end_text|>")
    )
    sampled = renderer.tokenizer.encode("one<|end_text|><|im_end|>")
    assert renderer.parse(sampled, [], ()).text == "one"
    _, choice = fed(ReplyParser(renderer, [], (), (), lambda at: f"id{at}"), sampled, [], "stop")
    assert choice.message.text == "one"
