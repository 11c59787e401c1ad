"""Times on record, in seconds since 1970: which are possible, and how people read them."""

from __future__ import annotations

from datetime import UTC, datetime

LATEST = 253_370_764_800.0
"""9999-01-01. A later time has no date."""


def is_moment(at: float) -> bool:
    """True if something on record can have this time. False for NaN."""
    return 0 <= at < LATEST


def utc_text(at: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """The time in UTC; its number if it has no date, so that one bad time never keeps other rows from being shown."""
    return datetime.fromtimestamp(at, UTC).strftime(form) if is_moment(at) else f"{at:g}"
