"""A model call that has arrived: who makes it, what it asks, and of which policy."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolltap.proxy.conversation.chat import ChatRequest
from rolltap.proxy.dialects.base import Dialect, WireRequest

if TYPE_CHECKING:
    from rolltap.proxy.call.policies import Policy
    from rolltap.proxy.sessions.session_cache import LiveSession


@dataclass(eq=False)
class Arrival:
    """A request on its way through admission, which fills in the last three fields."""

    dialect: Dialect
    wire: WireRequest
    at: float = field(default_factory=time.perf_counter)
    has_session: bool = False  # from here on a refusal can be recorded
    session: LiveSession = field(init=False)
    request: ChatRequest = field(init=False)
    policy: Policy = field(init=False)

    def take_session(self, session: LiveSession) -> None:
        self.session, self.has_session = session, True

    def __post_init__(self) -> None:
        self.body_hash = hashlib.sha256(self.wire.body).hexdigest()  # tells a client's retry from another request
