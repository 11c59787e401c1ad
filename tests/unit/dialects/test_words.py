"""A validator's reasons, in the words of JSON."""

from __future__ import annotations

import pytest

from rolltap.wording import in_words, value_problem


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


def test_a_value_of_a_file_is_named_with_its_place() -> None:
    assert value_problem("Expected `float`, got `str` - at `$.limits.agent_s`") == (
        "limits.agent_s: expected a number, got a text"
    )
    assert value_problem("Object missing required field `id`") == "the field `id` is missing"
    assert value_problem("Object contains unknown field `x` - at `$.a`") == "a: the field `x` is unknown"
