"""Arguments that are streamed are a beginning of what was sampled, and of JSON, wherever the text is cut."""

from __future__ import annotations

import json
from typing import Any

import jiter
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.proxy.continuation.json_calls import HERMES, GrowingObject, read_call

PROPERTY = settings(max_examples=300, deadline=None)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
SPELLINGS = st.builds(
    lambda value, indent, ascii: json.dumps(value, indent=indent, ensure_ascii=ascii),
    OBJECTS,
    st.sampled_from([None, 0, 2, "\t"]),
    st.booleans(),
)


def pieces(text: str, sizes: list[int]) -> list[str]:
    out: list[str] = []
    while text:
        size = sizes.pop() if sizes else 1
        out.append(text[:size])
        text = text[size:]
    return out


def grown(text: str, sizes: list[int] | None = None) -> GrowingObject:
    value = GrowingObject()
    added = "".join(value.feed(piece) for piece in pieces(text, list(sizes or [len(text)])))
    assert added == value.text
    return value


@PROPERTY
@given(text=SPELLINGS, after=st.text(max_size=4), sizes=st.lists(st.integers(1, 6), max_size=40))
def test_an_object_is_told_to_its_end_and_no_further(text: str, after: str, sizes: list[int]) -> None:
    value = grown(text + after, sizes)
    assert value.over
    assert value.text == text


@PROPERTY
@given(text=SPELLINGS, cut=st.integers(0, 400), sizes=st.lists(st.integers(1, 6), max_size=40))
def test_what_is_cut_off_is_a_beginning_that_vendors_clients_can_read(text: str, cut: int, sizes: list[int]) -> None:
    text = text[:cut]
    value = grown(text, sizes)
    assert text.startswith(value.text)
    assert len(text) - len(value.text) <= 30  # no more than a number or an escape is held
    if value.text:
        assert isinstance(jiter.from_json(value.text.encode(), partial_mode=True), dict)


@PROPERTY
@given(
    text=SPELLINGS,
    noise=st.text('{}[]",:\\ \nu0d8eE+-.truefalsn', max_size=12),
    at=st.integers(0, 200),
    sizes=st.lists(st.integers(1, 6), max_size=40),
)
def test_what_is_no_json_is_told_up_to_there(text: str, noise: str, at: int, sizes: list[int]) -> None:
    broken = text[:at] + noise + text[at:]
    value = grown(broken, sizes)
    assert value.text == grown(broken).text
    assert broken.startswith(value.text)
    if value.text:
        assert isinstance(jiter.from_json(value.text.encode(), partial_mode=True), dict)
    try:
        msgspec.json.decode(broken)
    except msgspec.DecodeError:
        assert not value.complete or len(value.text) < len(broken)
    else:
        assert value.text == broken.strip() or not broken.startswith("{")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 120', '{"a": '),
        ('{"a": 120,', '{"a": 120,'),
        ('{"a": tru', '{"a": '),
        ('{"a": "x\\', '{"a": "x'),
        ('{"a": "x\\u00e', '{"a": "x'),
        ('{"a": "x\\u00e9y', '{"a": "x\\u00e9y'),
        ('{"a": 01}', '{"a": '),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a" 1}', '{"a" '),
        ("{'a': 1}", "{"),
        ('{"a": "line\nbreak"}', '{"a": "line'),
        ('{"a": [1 2]}', '{"a": [1 '),
        ('{"a": [}', '{"a": ['),
        ('{"a": NaN}', '{"a": '),
        ('{"a": -Infinity}', '{"a": '),
        ('{"a": 1e999}', '{"a": '),
        ('{"a": "x\\ud83d\\ude00y"}', '{"a": "x\\ud83d\\ude00y"}'),
        ('{"a": "x\\ud83d', '{"a": "x'),
        ('{"a": "x\\ud83d\\ude0', '{"a": "x'),
        ('{"a": "x\\ud83d y"}', '{"a": "x'),
        ('{"a": "x\\ud83d\\ud83d"}', '{"a": "x'),
        ('{"a": "x\\ude00"}', '{"a": "x'),
        ('{"a": "\\ud7ff\\ue000\\uEfFf"}', '{"a": "\\ud7ff\\ue000\\uEfFf"}'),
        (f'{{"a": {"[" * 55}{"]" * 55}}}', f'{{"a": {"[" * 55}{"]" * 55}}}'),
        (f'{{"a": {"[" * 80}{"]" * 80}}}', f'{{"a": {"[" * 55}'),
        ('{"a": {}} and more', '{"a": {}}'),
        ("[1]", ""),
        ("12 ", ""),
        ('"{"', ""),
    ],
)
def test_how_far_arguments_are_told(text: str, told: str) -> None:
    assert grown(text, [1] * len(text)).text == told


@pytest.mark.parametrize(
    ("block", "name", "arguments"),
    [
        ('\n{"name": "bash", "arguments": {"n": 1}}\n', "bash", '{"n": 1}'),
        ('{ "name" : "a-b" ,\n"arguments":{ }, "id": 3}', "a-b", "{ }"),
        ('{"name": "bash", "arguments": {"n": 1}', "bash", '{"n": 1}'),
        ('{"name": "bash", "arguments": {"n', "bash", '{"n'),
        ('{"name": "bash", "arguments": ', None, ""),
        (f'{{"name": "{"b" * 256}", "arguments": {{}}}}', "b" * 256, "{}"),
        (f'{{"name": "{"b" * 257}", "arguments": {{}}}}', None, ""),
        ('{"name": "bash", "arguments": "ls"}', None, ""),
        ('{"arguments": {}, "name": "bash"}', None, ""),
        ('{"name": "", "arguments": {}}', None, ""),
        ('{"name": 3, "arguments": {}}', None, ""),
    ],
)
def test_a_call_begins_with_its_name_and_an_object(block: str, name: str | None, arguments: str) -> None:
    for end in range(len(block)):
        read: Any = read_call(HERMES, block[:end])
        assert name is None or read.name in (None, name)
        assert arguments.startswith(read.arguments)
    read = read_call(HERMES, block)
    assert (read.name, read.arguments) == (name, arguments)
