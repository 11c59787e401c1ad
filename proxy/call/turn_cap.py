"""The cap on a session's turns, as the proxy holds a harness to it that did not stop by itself.

The cap stands in the session's tag `turns`. A call that would be a later turn of its conversation is refused politely
(400, in the dialect's own shape: harnesses end on it, with what they have); after `POLITE` of those every call is
refused as if the session were closed. Conversations begun anew count together: the session as a whole has
`CONVERSATIONS` times the cap, so nobody gets around it by editing histories.
"""

from __future__ import annotations

from rolltap.errors import InvalidRequest, SessionClosed
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.sessions.session_cache import LiveSession
from rolltap.proxy.sessions.tags import TURNS
from rolltap.types import Session

POLITE = 3
CONVERSATIONS = 4
REACHED = "turn cap reached"


def cap_of(session: Session) -> int:
    """0 where there is none."""
    return int(session.tags.get(TURNS, 0))


def check_turn(live: LiveSession, parent: CallNode | None) -> None:
    """Raises where a call that continues `parent` is over the session's cap."""
    cap = cap_of(live.session)
    if not cap or (_depth(parent) < cap and len(live.forest.nodes) < CONVERSATIONS * cap):
        return
    live.refused_turns += 1
    if live.refused_turns > POLITE:
        raise SessionClosed(f"{REACHED}: the rollout is over")
    raise InvalidRequest(f"{REACHED}: this rollout has {cap} turns; end with what you have")


def _depth(node: CallNode | None) -> int:
    """Turns up to and including `node`."""
    count = 0
    while node is not None:
        count, node = count + 1, node.parent
    return count
