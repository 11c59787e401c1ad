"""A field that asks for nothing is taken whatever its name, in every dialect and at every depth; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.errors import InvalidRequest
from rolltap.protocols.requests import ASKED_BY_PRESENCE, NOTHING_WORDS, OFF_IS_ASKED, ON_BY_DEFAULT, decode

HI = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}

PLACES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "chat": ("openai_chat", lambda more: more),
    "chat, stream_options": ("openai_chat", lambda more: {"stream_options": more}),
    "chat, reasoning": ("openai_chat", lambda more: {"reasoning": {"effort": "low", **more}}),
    "chat, template": ("openai_chat", lambda more: {"chat_template_kwargs": {"enable_thinking": True, **more}}),
    "responses": ("openai_responses", lambda more: more),
    "responses, text": ("openai_responses", lambda more: {"text": {"verbosity": "low", **more}}),
    "responses, reasoning": ("openai_responses", lambda more: {"reasoning": {"effort": "low", **more}}),
    "messages": ("anthropic", lambda more: more),
    "messages, output": ("anthropic", lambda more: {"output_config": {"effort": "low", **more}}),
    "messages, context": ("anthropic", lambda more: {"context_management": {"edits": [], **more}}),
    "gemini": ("gemini", lambda more: more),
    "gemini, config": ("gemini", lambda more: {"generationConfig": {"topP": 0.5, **more}}),
    "gemini, thinking": ("gemini", lambda more: {"generationConfig": {"thinkingConfig": more}}),
    "gemini, part": ("gemini", lambda more: {"contents": [{"role": "user", "parts": [{"text": "hi", **more}]}]}),
    "gemini, content": ("gemini", lambda more: {"contents": [{"role": "user", "parts": [{"text": "hi"}], **more}]}),
    "completions": ("openai_completions", lambda more: more),
}

words = st.sampled_from(sorted(NOTHING_WORDS)).flatmap(lambda word: st.sampled_from([word, word.upper(), f" {word} "]))
flat = st.one_of(st.none(), st.just(False), st.just(""), words)
nothing = st.recursive(
    flat,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=6).filter(lambda name: name not in ON_BY_DEFAULT), inner, max_size=3),
        st.builds(
            lambda off, more: {**more, "mode": off},
            words,
            st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
        ),
    ),
    max_leaves=6,
)
something = st.one_of(
    st.just(True),
    st.integers(),
    st.text(min_size=1).filter(lambda text: text.strip().lower() not in NOTHING_WORDS and text.strip() != ""),
    st.lists(st.integers(), min_size=1, max_size=2),
    st.dictionaries(st.just("depth"), st.integers(), min_size=1),
)
names = st.text(min_size=1, max_size=12).map(lambda text: f"zz_{text}")


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data())
def test_what_asks_for_nothing_is_taken(parse: Any, place: str, data: st.DataObject) -> None:
    dialect, within = PLACES[place]
    more = data.draw(st.dictionaries(names, nothing, min_size=1, max_size=3))
    plain, request = parse(dialect, **within({})), parse(dialect, **within(more))
    assert (request.messages, request.sampling, request.tool_choice) == (
        plain.messages,
        plain.sampling,
        plain.tool_choice,
    )


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data())
def test_what_asks_for_something_is_refused_by_name(parse: Any, place: str, data: st.DataObject) -> None:
    dialect, within = PLACES[place]
    name = data.draw(names.filter(lambda name: "_" not in name[3:]))  # Gemini reads snake_case, too
    idle = data.draw(st.dictionaries(names, nothing, max_size=2).filter(lambda fields: name not in fields))
    with pytest.raises(InvalidRequest) as raised:
        parse(dialect, **within({**idle, name: data.draw(something)}))
    assert (raised.value.param or "").endswith(name)


@pytest.mark.parametrize("value", ["off", "", [], {}, None, False, "disabled"])
@pytest.mark.parametrize("field", ["truncation", "background", "context_management", "moderation", "conversation"])
def test_a_known_field_may_ask_for_nothing_in_another_way(parse: Any, field: str, value: Any) -> None:
    assert parse("openai_responses", **{field: value}) is not None


def test_a_harness_of_the_field_is_served(parse: Any) -> None:
    chat = parse("openai_chat", search_parameters={"mode": "off", "return_citations": True}, logit_bias={})
    assert chat.messages[0].text == "hi"


@pytest.mark.parametrize(
    ("dialect", "fields", "param"),
    [
        ("openai_chat", {"web_search_options": {}}, "web_search_options"),
        ("openai_chat", {"add_generation_prompt": False}, "add_generation_prompt"),
        ("openai_chat", {"tool_choice": "off"}, "tool_choice"),
        ("openai_chat", {"search_parameters": {"mode": "auto"}}, "search_parameters"),
        ("openai_chat", {"reasoning": {"enabled": True, "colour": 3}}, "reasoning.colour"),
        ("gemini", {"tools": [{"codeExecution": {}}]}, "tools[0].codeExecution"),
        ("openai_chat", {"model": ""}, "model"),
        ("anthropic", {"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_an_empty_value_that_asks_is_refused(refusal: Any, dialect: str, fields: Any, param: str) -> None:
    assert refusal(dialect, **fields) == param


def test_the_other_values_keep_their_bytes() -> None:
    class Entry(msgspec.Struct, forbid_unknown_fields=True):
        input: msgspec.Raw

    written = b'{"b": 1.0, "a": 12345678901234567890, "c": "\\u00e9"}'
    assert bytes(decode(b'{"foo": "off", "input": ' + written + b"}", Entry).input) == written


def test_the_exceptions_do_not_overlap() -> None:
    assert not ON_BY_DEFAULT & OFF_IS_ASKED
    assert not ASKED_BY_PRESENCE & OFF_IS_ASKED


@pytest.mark.parametrize(("size", "taken"), [(0, 40), (3_000_000, 4)])
def test_long_json_may_have_few_of_them(parse: Any, refusal: Any, size: int, taken: int) -> None:
    """Each costs decoding the JSON again."""
    part = {"text": "a" * size, **{f"zz{number}": None for number in range(taken)}}
    assert parse("gemini", contents=[{"role": "user", "parts": [part]}]).messages
    part |= {f"zz{number}": None for number in range(100)}
    assert "zz" in refusal("gemini", contents=[{"role": "user", "parts": [part]}])
