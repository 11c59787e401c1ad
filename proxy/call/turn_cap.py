"""Enforces a session's turn cap for harnesses that do not stop by themselves.

The session's tag `turns` holds the cap. A call beyond the cap of its conversation is answered with 400 in the dialect's
shape: harnesses stop on it and keep their results. After `FINAL_ANSWERS` such answers every call is refused as if the
session were closed. The session as a whole may make `CONVERSATIONS` times as many calls, so editing the history to
start new conversations does not avoid the cap.
"""

from __future__ import annotations

from rolltap.contract.tags import TURNS
from rolltap.errors import InvalidRequest, SessionClosed
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.sessions.session_cache import LiveSession
from rolltap.types import Session

FINAL_ANSWERS = 3
CONVERSATIONS = 4
REACHED = "turn cap reached"


def cap_of(session: Session) -> int:
    """The session's turn cap; 0 if it has none."""
    return int(session.tags.get(TURNS, 0))


def check_turn(live: LiveSession, parent: CallNode | None) -> None:
    """Raises if a call that continues `parent` exceeds the session's cap."""
    cap = cap_of(live.session)
    if not cap or (_depth(parent) < cap and len(live.forest.nodes) < CONVERSATIONS * cap):
        return
    live.refused_turns += 1
    if live.refused_turns > FINAL_ANSWERS:
        raise SessionClosed(f"{REACHED}: the rollout is over")
    raise InvalidRequest(f"{REACHED}: this rollout has {cap} turns; finish now with the work done so far")


def _depth(node: CallNode | None) -> int:
    """The number of turns up to and including `node`."""
    count = 0
    while node is not None:
        count, node = count + 1, node.parent
    return count
