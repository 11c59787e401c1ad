"""A validator's reasons, in the words of JSON."""

from __future__ import annotations

import pytest

from rolltap.protocols.requests import in_words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Expected `object` of length <= 0", "not supported here: leave it out, or send an empty object"),
        ("Expected `array` of length <= 64", "expected a list of length at most 64"),
        ("Expected `float` <= 2.0", "expected a number at most 2.0"),
        ("Expected `int | null`, got `str`", "expected an integer or null, got a text"),
        ("Invalid enum value 'x'", "'x' is not one of its values"),
    ],
)
def test_no_type_of_the_validator_is_named(reason: str, words: str) -> None:
    assert in_words(reason) == words
