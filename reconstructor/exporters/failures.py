"""Rows that could not be made: counted by reason, the first of them named, and left out."""

from __future__ import annotations

from collections import Counter
from typing import Any

NAMED = 100
"""So many failures are named in a manifest; the others are counted only."""


class Failures:
    """`take` counts one. A reason is the error's type and first line."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._named: list[dict[str, Any]] = []

    def take(self, error: Exception, session_id: str, row: int) -> None:
        """`row` is the place, from 0, among the rows that the format made of the group of this session."""
        reason = reason_of(error)
        self._reasons[reason] += 1
        if len(self._named) < NAMED:
            self._named.append({"session_id": session_id, "row": row, "reason": reason})

    @property
    def count(self) -> int:
        return self._reasons.total()

    def to_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "by_reason": dict(sorted(self._reasons.items())),
            "rows": self._named,
        }


def reason_of(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
