"""Draws the comparison of two ranges of weight versions: its scale, and which way a task went."""

from __future__ import annotations

from rolltap.reading.comparing import VersionComparison
from rolltap.reading.intervals import Interval


def reach_of(comparison: VersionComparison) -> float:
    """Returns the largest distance from 0 of all intervals and differences: the scale of the drawing."""
    ends = [abs(end) for task in comparison.tasks for end in (*(task.interval or ()), task.difference)]
    return max(ends, default=0.0) or 1.0


def tone(difference: float, interval: Interval | None) -> str:
    """Returns "better" or "worse" if the interval does not contain 0, else ""."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return ""
    return "better" if difference > 0 else "worse"
