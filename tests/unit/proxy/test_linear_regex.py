"""Patterns in linear time find what `re` finds, and end on every text."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.errors import InvalidRequest
from rolltap.linear_regex import LinearPattern

ATOMS = st.sampled_from(
    ["a", "b", "c", ".", r"\w", r"\d", r"\s", "[ab]", "[^a]", "[a-c1]", r"\b", r"\B", "^", "$", r"\Z"]
)
REPEATS = st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}?", "{2,}"])


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.tuples(inner, REPEATS).map(lambda each: f"(?:{each[0]}){each[1]}")
    return st.one_of(
        groups,
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        inner.map(lambda each: f"({each})"),
        inner.map(lambda each: f"(?s:{each})"),
        inner.map(lambda each: f"(?m:{each})"),
        inner.map(lambda each: f"(?i:{each})"),
    )


PATTERNS = st.recursive(ATOMS, _joined, max_leaves=8)


@settings(max_examples=400, deadline=None)
@given(PATTERNS, st.text("abcA1 \n", max_size=24))
def test_it_finds_what_re_finds(pattern: str, text: str) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error:  # two repetitions in a row
        return
    expected = [match.span() for match in compiled.finditer(text) if match.end() > match.start()]
    assert LinearPattern(pattern).spans(text) == (expected, True)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+$", "a" * 20_000 + "b"),
        ("(x+x+)+y", "x" * 20_000),
        ("(a|a)*c", "a" * 20_000),
        ("(.*)*=(.*)*", "-" * 20_000),
        ("a.{0,200}b", "a" * 20_000),
        ("a.*b|a", "a" * 20_000),  # each match reads to the end again
    ],
)
def test_what_backtracks_forever_ends(pattern: str, text: str) -> None:
    started = time.process_time()
    found, whole = LinearPattern(pattern).spans(text)
    assert time.process_time() - started < 20
    assert whole or found


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", "a++", "(?>a)b", "(a)?(?(1)b|c)", "[", "a" * 1001, "a{2000}"],
)
def test_what_it_refuses(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        LinearPattern(pattern)
