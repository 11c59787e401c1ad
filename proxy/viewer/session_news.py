"""Updates of a session's page while the session continues: whether anything changed, and then what is new."""

from __future__ import annotations

import hashlib
import time
from urllib.parse import quote, urlencode

import msgspec

from rolltap.reading.types import SessionDetail, SessionSummary
from rolltap.types import RolloutStatus


def state_of(summary: SessionSummary) -> str:
    """Returns a hash of all that the list of sessions shows: calls, labels, the reward, the end."""
    return hashlib.sha256(msgspec.json.encode(summary)).hexdigest()[:16]


def goes_on(summary: SessionSummary, now: float | None = None) -> bool:
    """True if more may come: the session accepts calls, or its rollout has not ended."""
    if summary.status == RolloutStatus.RUNNING or summary.open_calls:
        return True
    return summary.closed_at is None and summary.expires_at > (time.time() if now is None else now)


def news_address(detail: SessionDetail) -> str:
    """Returns the address where a page of this state asks for news; empty if none can come."""
    if not goes_on(detail.summary):
        return ""
    query = urlencode({"seen": state_of(detail.summary)})
    return f"/view/sessions/{quote(detail.summary.id, safe='')}/news?{query}"
