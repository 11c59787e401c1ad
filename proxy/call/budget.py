"""Budgets of a session, and of a project key over all its sessions: calls, tokens, bytes, rates; turn caps.

A body's bytes count once it has arrived, even if the request is refused for another reason.

When the budget of a session or its key is used up, its next `FINAL_ANSWERS` calls are answered with 400 in the
dialect's shape: harnesses stop on it and keep their results. Later calls are refused as if the session were closed. A
session that is only too fast gets 429. A session's calls and tokens are counted from the record, so they survive a
restart; its bytes and its rate are counted per process. `rolltap.proxy.sessions.key_accounts` counts a key's usage.

The turn cap is for harnesses that do not stop by themselves: the session's tag `turns` holds it. A call beyond the cap
of its conversation is answered like one beyond a budget. The session as a whole may make `CONVERSATIONS` times as many
calls, so editing the history to start new conversations does not avoid the cap.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from rolltap.contract.tags import TURNS
from rolltap.errors import InvalidRequest, RateLimited, SessionClosed
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.plan import PromptPlan
from rolltap.proxy.sessions.key_accounts import USED, KeyAccount
from rolltap.proxy.sessions.live_sessions import LiveSession
from rolltap.settings import LimitSettings
from rolltap.types import Session
from rolltap.wording import counted

if TYPE_CHECKING:
    from rolltap.proxy.call.policy import Arrival


FINAL_ANSWERS = 3
CONVERSATIONS = 4
REACHED = "turn cap reached"


@dataclass(frozen=True, slots=True, eq=False)
class BodySender:
    """The sender of a body: its session, or None if only the body can tell; the account of a minted project key."""

    session: LiveSession | None
    account: KeyAccount | None

    def check_bytes(self, limits: LimitSettings) -> None:
        """Raises `SessionClosed` if the bytes exceed a budget by more than `FINAL_ANSWERS` bodies."""
        final_mb = FINAL_ANSWERS * limits.body_mb
        live, account = self.session, self.account
        if live is not None and limits.session_mb and live.received_bytes > (limits.session_mb + final_mb) * 1_000_000:
            raise SessionClosed(f"{USED}: this session has {limits.session_mb:g} MB of requests")
        if account is not None and account.over_bytes(final_mb):
            raise SessionClosed(f"{USED}: this key has {account.budget.mb:g} MB of requests")

    def count(self, body_bytes: int) -> None:
        """Counts the bytes of a body that arrived."""
        if self.session is not None:
            self.session.received_bytes += body_bytes
        if self.account is not None:
            self.account.count(body_bytes=body_bytes)


def count_body(arrival: Arrival) -> None:
    """Counts the arrival's body once, for its session and its account as far as they are known."""
    if not arrival.is_counted:
        arrival.is_counted = True
        BodySender(arrival.session if arrival.has_session else None, arrival.account).count(len(arrival.wire.body))


def charge(live: LiveSession, limits: LimitSettings, calls: int = 1) -> None:
    """Charges a request's calls to the session and its key. Raises if one of them has no budget left."""
    if used := _used_up(live, limits):
        _refuse_over_budget(live, f"this session has {used}")
    account = live.account
    if account is None:
        _take_tokens(("session", live, limits.calls_per_minute))
        return
    if used := account.used_up(calls):
        _refuse_over_budget(live, f"this key has {used}")
    _take_tokens(("session", live, limits.calls_per_minute), ("key", account, account.budget.per_minute or 0))
    account.count(calls=calls)


def _refuse_over_budget(live: LiveSession, why: str) -> NoReturn:
    live.refused_turns += 1
    if live.refused_turns > FINAL_ANSWERS:
        raise SessionClosed(f"{USED}: the session is over")
    raise InvalidRequest(f"{USED}: {why}; finish now with the work done so far")


def _used_up(live: LiveSession, limits: LimitSettings) -> str:
    """The used-up budget as text; empty if none is used up."""
    if limits.session_calls and live.forest.own_calls >= limits.session_calls:
        return counted(limits.session_calls, "call")
    if limits.session_tokens:
        tokens = sum(node.prompt_length + len(node.output_ids) for node in live.forest.own)
        if tokens >= limits.session_tokens:
            return counted(limits.session_tokens, "token")
    if limits.session_mb and live.received_bytes > limits.session_mb * 1_000_000:
        return f"{limits.session_mb:g} MB of requests"
    return ""


def _take_tokens(*rates: tuple[str, LiveSession | KeyAccount, int]) -> None:
    """Takes one call from every rate's token bucket, or from none.

    A bucket holds a minute's calls and refills steadily.
    """
    now, takes = time.monotonic(), []
    for name, holder, per_minute in rates:
        if not per_minute:
            continue
        every, full_at = 60 / per_minute, max(holder.bucket_full_at, now)
        if full_at - now > 60 - every:
            wait = full_at - now - 60 + every
            raise RateLimited(f"this {name} makes {per_minute} calls a minute", retry_after=wait)
        takes.append((holder, full_at + every))
    for holder, full_at in takes:
        holder.bucket_full_at = full_at


def cap_of(session: Session) -> int:
    """The session's turn cap; 0 if it has none."""
    return int(session.tags.get(TURNS, 0))


def check_turn(live: LiveSession, call_id: str, plan: PromptPlan) -> None:
    """Raises if the planned call exceeds the session's cap."""
    cap = cap_of(live.session)
    if not cap or (_turns(plan.node(call_id)) <= cap and live.forest.own_calls < CONVERSATIONS * cap):
        return
    live.refused_turns += 1
    if live.refused_turns > FINAL_ANSWERS:
        raise SessionClosed(f"{REACHED}: the rollout is over")
    raise InvalidRequest(f"{REACHED}: this rollout has {cap} turns; finish now with the work done so far")


def _turns(node: CallNode | None) -> int:
    """The number of turns up to and including that of `node`, those of a fork's origin, too."""
    count = 0
    while node is not None:
        count, node = count + (not node.repeats_parent), node.parent
    return count
