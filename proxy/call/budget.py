"""What one session may use in all: calls, tokens, bytes, and calls a minute. (How long it lives: `session_ttl_s`.)

A session that has used its budget is told so politely (400, in the dialect's own shape: harnesses end on it, with what
they have), `POLITE` times; after that it is refused as if it were closed. One that is only too fast is asked to wait
(429). Calls and tokens are counted from the record, so they outlast this process; bytes and the rate are its own.
"""

from __future__ import annotations

import time

from rolltap.errors import InvalidRequest, RateLimited, SessionClosed
from rolltap.proxy.call.turn_cap import POLITE
from rolltap.proxy.sessions.session_cache import LiveSession
from rolltap.settings import LimitSettings

USED = "budget used"


def charge(live: LiveSession, limits: LimitSettings, body_bytes: int) -> None:
    """Takes a new call into account; raises where the session has no budget for it."""
    live.received_bytes += body_bytes
    if used := _used_up(live, limits):
        live.refused_turns += 1
        if live.refused_turns > POLITE:
            raise SessionClosed(f"{USED}: the session is over")
        raise InvalidRequest(f"{USED}: this session has {used}; end with what you have")
    if limits.calls_per_minute:
        _wait_for_turn(live, limits.calls_per_minute)


def _used_up(live: LiveSession, limits: LimitSettings) -> str:
    """The budget that is used up, in words; empty if none is."""
    nodes = live.forest.nodes
    if limits.session_calls and len(nodes) >= limits.session_calls:
        return f"{limits.session_calls:,} calls"
    if limits.session_tokens:
        tokens = sum(node.prompt_length + len(node.output_ids) for node in nodes.values())
        if tokens >= limits.session_tokens:
            return f"{limits.session_tokens:,} tokens"
    if limits.session_mb and live.received_bytes > limits.session_mb * 1_000_000:
        return f"{limits.session_mb:g} MB of requests"
    return ""


def _wait_for_turn(live: LiveSession, per_minute: int) -> None:
    """A bucket that holds a minute's calls and fills as the minute goes."""
    now, every = time.monotonic(), 60 / per_minute
    full_at = max(live.bucket_full_at, now)
    if full_at - now > 60 - every:
        raise RateLimited(f"this session makes {per_minute} calls a minute", retry_after=full_at - now - 60 + every)
    live.bucket_full_at = full_at + every
