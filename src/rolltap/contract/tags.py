"""Sizes of a session's tags, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping

from rolltap.errors import InvalidRequest

MAX_TAGS = 32
NAME_CHARS = 128
VALUE_CHARS = 8192


def check_sizes(tags: Mapping[str, str], most: int = MAX_TAGS) -> None:
    """Raises `InvalidRequest` for too many tags, too long ones, or text that no store can hold."""
    if len(tags) > most:
        raise InvalidRequest(f"a session has at most {most} tags", param="tags")
    for name, value in tags.items():
        if not 1 <= len(name) <= NAME_CHARS or len(value) > VALUE_CHARS:
            message = f"a tag's name has 1 to {NAME_CHARS} characters, its value at most {VALUE_CHARS}"
            raise InvalidRequest(message, param="tags")
        if "\0" in name + value or any("\ud800" <= character <= "\udfff" for character in name + value):
            raise InvalidRequest("a tag has no NUL and no half of a surrogate pair", param="tags")
