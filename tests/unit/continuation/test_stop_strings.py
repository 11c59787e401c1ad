"""A reply ends at the first stop string in its text, whether it is streamed or comes whole, and its tokens with it."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.protocols.conversation import Choice, TextDelta, ToolCallStarted
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.proxy.continuation.template import TemplateRenderer

from .conftest import BASH
from .making import fed, glm_family, llama_renderer, mistral_renderer

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def whole(family: FamilyRenderer) -> FamilyRenderer:
    """The family as if nothing were known of its tokens: its replies come whole."""
    renderer = copy(family)
    renderer.markers = replace(family.markers, beginnings=None)
    return renderer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return llama_renderer(tmp_path_factory.mktemp("llama"))


def read(
    renderer: Any,
    ids: list[int],
    stops: tuple[str, ...],
    sizes: list[int] | None = None,
    finish: Any = "stop",
):
    """The events, the reply and the number of its ids, fed in chunks of `sizes` and then singly."""
    reader = ReplyParser(renderer, [], (BASH,), stops, lambda at: f"id{at}")
    events, choice = fed(reader, ids, sizes or [], finish)
    return events, choice, reader.consumed


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def outcome(choice: Choice) -> tuple[str, str, str | None]:
    return choice.message.text, choice.finish, choice.stop


@PROPERTY
@given(
    before=st.text("abc STO\n", max_size=12),
    after=st.text("abcSTOP", max_size=8),
    sizes=st.lists(st.integers(1, 5), max_size=20),
)
def test_a_stop_string_is_never_seen_and_ends_the_tokens(
    family: Any, whole: Any, before: str, after: str, sizes: list[int]
) -> None:
    text = before + "STOP" + after
    ids = family.tokenizer.encode(text)
    events, choice, consumed = read(family, ids, ("STOP",), sizes)
    assert outcome(choice) == (text[: text.index("STOP")], "stop", "STOP")
    assert text_of(events) == choice.message.text
    assert "STOP" in family.tokenizer.decode(ids[:consumed])
    assert "STOP" not in family.tokenizer.decode(ids[: consumed - 1])
    events, same, cut = read(whole, ids, ("STOP",), sizes)
    assert (outcome(same), cut) == (outcome(choice), consumed)
    assert text_of(events) == choice.message.text


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_plain_text_object_ends_at_a_stop_string(llama: TemplateRenderer, finish: str) -> None:
    ids = llama.tokenizer.encode('{"a": 1}\nObservation: 2<|eot_id|>')
    events, choice, consumed = read(llama, ids, ("Observation:", "never"), finish=finish)
    assert outcome(choice) == ('{"a": 1}\n', "stop", "Observation:")
    assert text_of(events) == choice.message.text
    assert llama.tokenizer.decode(ids[:consumed]).endswith("Observation:")


def test_of_several_stop_strings_the_first_in_the_text_counts(whole: Any) -> None:
    ids = whole.tokenizer.encode("one two three four")
    assert outcome(read(whole, ids, ("three", "two"))[1]) == ("one ", "stop", "two")


def test_a_stop_string_within_thinking_or_a_call_ends_nothing(family: Any, whole: Any, llama: Any) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "STOP"}}\n</tool_call>'
    ids = family.tokenizer.encode(f"<think>\nSTOP\n</think>\n\nI look.\n{call}")
    for renderer in (family, whole):
        _, choice, consumed = read(renderer, ids, ("STOP",))
        assert outcome(choice) == ("I look.", "tool_calls", None)
        assert choice.message.reasoning == "STOP"
        assert consumed == len(ids)
    ids = llama.tokenizer.encode('{"name": "bash", "parameters": {"command": "STOP"}}')
    _, choice, consumed = read(llama, ids, ("STOP",))
    assert (outcome(choice), consumed) == (("", "tool_calls", None), len(ids))


def test_calls_before_the_stop_string_stay(family: Any) -> None:
    """A block that can't be read is text, and text ends the reply; the call before it was made."""
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "STOP"}}\n</tool_call>'
    ids = family.tokenizer.encode(f"{call}\n<tool_call>\nbash( STOP ) again\n</tool_call>\n{call}")
    events, choice, consumed = read(family, ids, ("STOP",))
    assert outcome(choice) == ("<tool_call>\nbash( ", "stop", "STOP")
    assert len(choice.message.tool_calls) == sum(isinstance(event, ToolCallStarted) for event in events) == 1
    assert family.tokenizer.decode(ids[:consumed]).endswith("bash( STOP")


def test_what_could_have_begun_a_stop_string_comes_before_the_call(family: Any) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    ids = family.tokenizer.encode(f"<think>\nTo S\n</think>\n\nSee ST{call}")
    events, choice, _ = read(family, ids, ("STOP",))
    call_at = next(at for at, event in enumerate(events) if isinstance(event, ToolCallStarted))
    assert text_of(events[:call_at]) == choice.message.text == "See ST"


def test_in_plain_text_an_object_is_a_call_only_where_there_are_tools(llama: TemplateRenderer) -> None:
    ids = llama.tokenizer.encode('{"name": "Ada", "born": 1815}')
    reader = ReplyParser(llama, [], (), (), lambda at: f"id{at}")
    reader.feed(ids)
    _, choice = reader.finish("stop")
    assert outcome(choice) == ('{"name": "Ada", "born": 1815}', "stop", None)
    assert choice.message.tool_calls == ()


AFTER_THINKING = [
    ("<think>a</think><think>b</think>ok", "<think>b</think>", "a"),
    ("<think></think><think>b</think>ok", "<think>b</think>", ""),
    ("\n<think>a</think>\nok", "", "a"),
    ("S<think>b</think>ok", "S<think>b</think>", ""),
    ("\nso <think>b</think>ok", "\nso <think>b</think>", ""),
]
"""Replies that end with "ok"; the text before it and the thinking."""


@pytest.mark.parametrize("size", [1, 99])
@pytest.mark.parametrize(("reply", "text", "thinking"), AFTER_THINKING)
def test_only_a_reply_that_begins_with_thinking_thinks(
    either: Any, reply: str, text: str, thinking: str, size: int
) -> None:
    ids = either.tokenizer.encode(reply)
    for stops, said, finish in (((), f"{text}ok", None), (("ok", "STOP"), text, "ok")):
        events, choice, consumed = read(either, ids, stops, [size])
        assert outcome(choice) == (said, "stop", finish)
        assert text_of(events) == said
        assert choice.message.reasoning == thinking
        assert consumed == len(ids)


def test_a_tag_after_a_call_opens_no_thinking(either: Any) -> None:
    """It is text, and the call after it is made."""
    call = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    ids = either.tokenizer.encode(f"<think>a</think>{call}<think>b</think>{call}")
    _, choice, _ = read(either, ids, ("ok",))
    assert outcome(choice) == ("<think>b</think>", "tool_calls", None)
    assert (choice.message.reasoning, len(choice.message.tool_calls)) == ("a", 2)


HERMES_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
HERMES_BROKEN = "<tool_call>\n{broken\n</tool_call>"
GLM_CALL = "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
GLM_BROKEN = "<tool_call>bash<arg_key>x</arg_key><arg_value>NaN</arg_value></tool_call>"


@pytest.mark.parametrize("size", [1, 7, 999])
def test_a_stop_string_in_a_block_that_is_no_call_ends_the_reply_there(tmp_path: Path, size: int) -> None:
    """Calls after it were sampled, but are never made. A stop string may begin before the block."""
    renderer = glm_family(tmp_path)
    kept = renderer.tokenizer.encode(f"<think>hm</think>{GLM_CALL}See ST{GLM_BROKEN}OP")
    ids = kept + renderer.tokenizer.encode(f"{GLM_CALL} and {GLM_CALL}")
    for stop, text in (
        ("STOP", None),
        ("ST<tool_call>bash", "See "),
        ("NaN", f"See ST{GLM_BROKEN.partition('NaN')[0]}"),
    ):
        events, choice, consumed = read(renderer, ids, (stop,), [size] * len(ids))
        assert len(choice.message.tool_calls) == sum(isinstance(event, ToolCallStarted) for event in events)
        assert text_of(events) == choice.message.text
        if text is None:
            assert choice.stop is None
        else:
            assert outcome(choice) == (text, "stop", stop)
            assert len(choice.message.tool_calls) == 1
            assert renderer.tokenizer.decode(ids[:consumed]).endswith(stop)


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("after", ["", " x", " x[TOOL_CALLS]bash[ARGS]{}"])
def test_a_block_that_the_next_one_ends_stops_where_the_stop_string_ends(tmp_path: Path, after: str, size: int) -> None:
    renderer = mistral_renderer(tmp_path, "args")
    ids = renderer.tokenizer.encode(f"[TOOL_CALLS]bash STOP{after}")
    _, choice, consumed = read(renderer, ids, ("STOP",), [size] * len(ids))
    assert outcome(choice) == ("[TOOL_CALLS]bash ", "stop", "STOP")
    assert renderer.tokenizer.decode(ids[:consumed]) == "[TOOL_CALLS]bash STOP"
