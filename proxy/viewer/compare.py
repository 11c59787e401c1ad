"""The comparison of two ranges of weight versions: which to begin with, and how far its intervals reach."""

from __future__ import annotations

from collections.abc import Sequence

from rolltap.reading.comparing import VersionComparison
from rolltap.reading.intervals import Interval
from rolltap.reading.types import RunPoint

SHARE = 3
"""By default a run's first third of versions is compared with its last."""


def first_and_last(points: Sequence[RunPoint]) -> tuple[str, str]:
    """The ranges that a run's page offers, as text; empty where the run has one version."""
    versions = sorted({point.newest_version for point in points if point.newest_version is not None})
    if len(versions) < 2:
        return "", ""
    size = max(1, len(versions) // SHARE)
    return _text(versions[0], versions[size - 1]), _text(versions[-size], versions[-1])


def _text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def reach_of(comparison: VersionComparison) -> float:
    """The largest distance from 0 that the intervals and differences have: what the drawing is as wide as."""
    ends = [abs(end) for task in comparison.tasks for end in (*(task.interval or ()), task.difference)]
    return max(ends, default=0.0) or 1.0


def tone(difference: float, interval: Interval | None) -> str:
    """Better or worse where the interval leaves out 0."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return ""
    return "better" if difference > 0 else "worse"
