"""Patterns find spans of bytes, and end on every text."""

from __future__ import annotations

import time

import pytest

from rolltap.contract.rules import LinearPattern
from rolltap.errors import InvalidRequest


@pytest.mark.parametrize(
    ("pattern", "data", "spans"),
    [
        ("b+", b"abbab", [(1, 3), (4, 5)]),
        ("é.", "xéyé\n".encode(), [(1, 4)]),
        (".", "\U0001f600".encode(), [(0, 4)]),
        (".", b"a\xff\xf0\x9fb", [(0, 1), (4, 5)]),  # halves of characters
        ("b*", b"ab", [(1, 2)]),  # nothing matches, too, and is left out
        ("(?s)<think>.*?</think>", b"<think>a\n</think>b</think>", [(0, 17)]),
    ],
)
def test_it_finds_bytes_of_whole_characters(pattern: str, data: bytes, spans: list[tuple[int, int]]) -> None:
    assert LinearPattern(pattern).spans(data) == (spans, True)


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
    found, whole = LinearPattern(pattern).spans(text.encode())
    assert time.process_time() - started < 20
    assert whole or found


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", "(?>a)b", "(a)?(?(1)b|c)", "[", "a" * 1001, "a{2000}"],
)
def test_what_it_refuses(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        LinearPattern(pattern)
