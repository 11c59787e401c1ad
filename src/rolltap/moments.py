"""Times on record, in seconds since 1970: which are possible, and how people read them."""

from __future__ import annotations

import time
from datetime import UTC, datetime

LATEST = 253_370_764_800.0
"""9999-01-01. A later time has no date."""


def is_moment(at: float) -> bool:
    """True if something on record can have this time. False for NaN."""
    return 0 <= at < LATEST


def utc_text(at: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """The time in UTC; its number if it has no date, so that one bad time never keeps other rows from being shown."""
    return datetime.fromtimestamp(at, UTC).strftime(form) if is_moment(at) else f"{at:g}"


UNIT_S = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


def ago(at: float | None, now: float | None = None) -> str:
    """Says how long ago a time was, in one unit; after 60 days the date."""
    if at is None:
        return ""
    age = (time.time() if now is None else now) - at
    if age < 10:
        return "now"
    for size, unit in ((60, "s"), (3600, "min"), (86_400, "h"), (86_400 * 60, "d")):
        if age < size:
            return f"{age / UNIT_S[unit]:.0f} {unit} ago"
    return utc_text(at)[:10]
