"""What counts as the same message, and what does not."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.protocols.contents import whole_members
from rolltap.protocols.conversation import Message, Reasoning, Text, ToolCall
from rolltap.proxy.continuation.canonical import canonical_arguments, message_digest, thought_digest


def assistant(text: str = "", *calls: tuple[str, str], reasoning: str = "") -> Message:
    parts = ((Reasoning(reasoning),) if reasoning else ()) + ((Text(text),) if text else ())
    return Message("assistant", parts, tuple(ToolCall(f"id{i}", n, a) for i, (n, a) in enumerate(calls)))


SAME = [
    (assistant("", ("bash", '{"a": 1, "b": [true]}')), assistant("", ("bash", '{"b":[true],"a":1.0}'))),
    (assistant("", ("bash", '{"t": "\\u00e9"}')), assistant("", ("bash", '{"t":"é"}'))),
    (assistant("done"), assistant("  done\n")),
    (assistant("done", reasoning="because"), assistant("done")),
    (Message("assistant"), Message("assistant", (Text(""),))),
    (Message("assistant", (Text("ab"),)), Message("assistant", (Text("a"), Text("b")))),
    (Message("user", (Text("a\nb"),)), Message("user", (Text("a"), Text("b")))),
    (Message("system", (Text("s"),)), Message("developer", (Text("s"),))),
    (
        Message("tool", (Text("out"),), tool_call_id="x"),
        Message("tool", (Text("out"),), tool_call_id="y"),
    ),
]

DIFFERENT = [
    (assistant("", ("bash", '{"a": true}')), assistant("", ("bash", '{"a": "true"}'))),
    (assistant("", ("bash", '{"a": 1}')), assistant("", ("sh", '{"a": 1}'))),
    (assistant("", ("bash", "{}"), ("bash", "{}")), assistant("", ("bash", "{}"))),
    (assistant("done"), assistant("Done")),
    (Message("user", (Text("a"),)), Message("user", (Text("a "),))),
    (Message("user", (Text("a"),)), Message("system", (Text("a"),))),
    (Message("tool", (Text("a"),), is_error=True), Message("tool", (Text("a"),))),
    (Message("tool", (Text("a"),), call_offset=1), Message("tool", (Text("a"),))),
    (Message("tool", (Text("a"),), call_offset=1), Message("tool", (Text("a"),), call_offset=-1)),
    (assistant("a", ("b", "{}")), assistant("ab", ("", "{}"))),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_same_in_meaning(one: Message, other: Message) -> None:
    assert message_digest(one) == message_digest(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_an_edit_is_an_edit(one: Message, other: Message) -> None:
    assert message_digest(one) != message_digest(other)


def number(text: str) -> str:
    return canonical_arguments(f'{{"n": {text}}}')


@given(st.integers(-(2**53), 2**53), st.integers(0, 3))
def test_a_whole_number_has_many_notations(value: int, zeros: int) -> None:
    scaled = f"{Decimal(value).scaleb(-zeros):f}"
    for text in (f"{value}.0", f"{value}e0", f"{value * 10}E-1", f"{scaled}e{zeros}", f"{scaled}E+0{zeros}"):
        assert number(text) == number(str(value)), text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_has_many_notations(value: float) -> None:
    shortest = Decimal(repr(value))
    for text in (f"{shortest:E}", f"{shortest:f}", repr(value).upper()):
        assert number(text) == number(repr(value)), text


@given(st.integers(), st.integers())
def test_integers_of_any_size_are_exact(one: int, other: int) -> None:
    assert (number(str(one)) == number(str(other))) is (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("1e23", "100000000000000000000000"), ("-0", "0"), ("-0.0", "0"), ("1E+2", "100"), ("1.50", "15e-1")],
)
def test_notations_of_one_number(one: str, other: str) -> None:
    assert number(one) == number(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("12345678901234567890", "12345678901234567891"),
        ("1e400", "1e401"),
        ("1", "true"),
        ("1", '"1"'),
        ("0.1", "0.10000000000000002"),
    ],
)
def test_other_numbers(one: str, other: str) -> None:
    assert number(one) != number(other)


def test_arguments_that_are_not_json_stay_text() -> None:
    assert canonical_arguments(" ls -l ") == "ls -l"
    assert canonical_arguments(' {"a": 1,, "b": 2} ') == '{"a": 1,, "b": 2}'


def test_arguments_that_were_cut_off_are_their_whole_members() -> None:
    for cut in ('{"b": [1, 2], "a": ', '{"a"', '{"a": 1, "b": {"c": "x'):
        assert canonical_arguments(cut) == canonical_arguments(json.dumps(whole_members(cut)))
    assert canonical_arguments('{"a": "x') != canonical_arguments('{"a": "x"}')


def test_arguments_nested_too_deep_for_python_are_text() -> None:
    for size in (600, 100_000):
        deep = '{"a":' * size + "1" + "}" * size
        assert canonical_arguments(f" {deep} ") == deep


def test_thinking_may_be_trimmed_but_not_changed() -> None:
    def digest(thought: str) -> bytes:
        return thought_digest(Message("assistant", (Reasoning(thought), Text("so"))))

    assert digest(" why\n") == digest("why") != digest("how")
    assert digest(" \n") == b""
