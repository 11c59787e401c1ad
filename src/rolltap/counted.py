"""Small pieces of what people read: a number and its noun, and the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """`1 session`, `2,000 sessions`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean codex?` for a name that is near a known one, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
