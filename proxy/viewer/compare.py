"""Compares two ranges of weight versions: the default ranges, and the scale of the drawing."""

from __future__ import annotations

from collections.abc import Sequence

from rolltap.reading.comparing import VersionComparison
from rolltap.reading.intervals import Interval
from rolltap.reading.types import RunPoint

SHARE = 3
"""By default, the first third of a run's versions is compared with the last."""


def first_and_last(points: Sequence[RunPoint]) -> tuple[str, str]:
    """Returns the ranges that a run's page offers, as text; empty if the run has fewer than two versions."""
    versions = sorted({point.newest_version for point in points if point.newest_version is not None})
    if len(versions) < 2:
        return "", ""
    size = max(1, len(versions) // SHARE)
    return _text(versions[0], versions[size - 1]), _text(versions[-size], versions[-1])


def _text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def reach_of(comparison: VersionComparison) -> float:
    """Returns the largest distance from 0 of all intervals and differences: the scale of the drawing."""
    ends = [abs(end) for task in comparison.tasks for end in (*(task.interval or ()), task.difference)]
    return max(ends, default=0.0) or 1.0


def tone(difference: float, interval: Interval | None) -> str:
    """Returns "better" or "worse" if the interval does not contain 0, else ""."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return ""
    return "better" if difference > 0 else "worse"
