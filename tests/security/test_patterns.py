"""No regular expression of ours takes more than twice as long for twice the text, whatever the text is.

About five CPU seconds for all of them.
"""

from __future__ import annotations

import pytest

from . import patterns
from .patterns import Use, slow_text, uses

KNOWN_SLOW = (
    (r"\s+$", "search"),
    (r"^\s*(alias|function)?\s*git", "search"),
    (r"^```(\w*)\n(.*?)^```$", "finditer"),
    (r"<a>(.*?)</a>", "findall"),
    (r"(a|a)*b", "match"),
    (r"(\w+\s?)*;", "match"),
    (r"x*y?x*z", "match"),
)
LINEAR = ((r"\s+", "sub"), (r"^\s*(?:(alias)\s+)?git", "search"), (r"<[^<>]*>", "search"), (r"[a-z]+\d", "match"))


@pytest.mark.parametrize(("pattern", "method"), KNOWN_SLOW)
def test_a_slow_pattern_is_found(pattern: str, method: str) -> None:
    assert slow_text(Use("here", pattern, 16 | 8 if "```" in pattern else 0, method))


@pytest.mark.parametrize(("pattern", "method"), LINEAR)
def test_a_linear_pattern_is_let_be(pattern: str, method: str) -> None:
    assert not slow_text(Use("here", pattern, 0, method))


def test_every_pattern_is_linear() -> None:
    found = list(uses())
    assert len(found) > 90
    assert {place.partition("/")[0] for place in (use.place for use in found)} == {
        folder.partition("/")[0] for folder in patterns.FOLDERS
    }
    slow = {f"{use.place} {use.method}": text for use in found if (text := slow_text(use))}
    assert slow == {}
