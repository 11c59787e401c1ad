"""Incomplete JSON arguments: cut off by the token limit, or followed by invalid JSON."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json


def whole_members(text: str) -> dict[str, Any] | None:
    """The complete members of a cut-off object, as Anthropic's client reads them.

    None for any other text, and if a member is not a JSON value (`NaN`), as no reply could contain it.
    """
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
