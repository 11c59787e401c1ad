"""A number and its noun, as people read them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 session`, `2,000 sessions`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
