"""What a session's page asks for while the session goes on: whether anything changed, and then what came."""

from __future__ import annotations

import hashlib
import time
from urllib.parse import quote, urlencode

import msgspec

from rolltap.reading.types import SessionDetail, SessionSummary
from rolltap.types import RolloutStatus


def state_of(summary: SessionSummary) -> str:
    """Differs as soon as anything that the list of sessions shows does: calls, labels, the reward, the end."""
    return hashlib.sha256(msgspec.json.encode(summary)).hexdigest()[:16]


def goes_on(summary: SessionSummary, now: float | None = None) -> bool:
    """Whether more may come: the session takes calls, or its rollout has yet to end."""
    if summary.status == RolloutStatus.RUNNING or summary.open_calls:
        return True
    return summary.closed_at is None and summary.expires_at > (time.time() if now is None else now)


def news_address(detail: SessionDetail) -> str:
    """Where a page of this state asks for news; empty where none can come."""
    if not goes_on(detail.summary):
        return ""
    query = urlencode({"seen": state_of(detail.summary)})
    return f"/view/sessions/{quote(detail.summary.id, safe='')}/news?{query}"
