"""Rows and sessions that failed. They are left out and counted by reason; the first ones are listed."""

from __future__ import annotations

from collections import Counter
from typing import Any

NAMED = 100
"""The most failures that a manifest lists; the others are only counted."""


class Failures:
    """Counts failures by reason: the error's type and first line."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._named: list[dict[str, Any]] = []

    def take(self, error: Exception, session_id: str, row: int | None) -> None:
        """Counts one failure. `row` is the row's index among the format's rows for this session's group.

        None: the session could not be read.
        """
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
