"""JSON arguments that end early: the token limit cut them off, or what followed was no JSON."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json


def whole_members(text: str) -> dict[str, Any] | None:
    """The members that a cut-off object has whole, as Anthropic's client reads them.

    None for any other text, and where a member is no JSON value (`NaN`), which no answer could carry.
    """
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
