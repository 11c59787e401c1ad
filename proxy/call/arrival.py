"""A model call that has arrived: who makes it, what it asks, and of which policy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolltap.proxy.conversation.chat import ChatRequest
from rolltap.proxy.dialects.base import Dialect, WireRequest

if TYPE_CHECKING:
    from rolltap.proxy.call.policies import Policy
    from rolltap.proxy.sessions.key_accounts import KeyAccount
    from rolltap.proxy.sessions.session_cache import LiveSession


@dataclass(eq=False)
class Arrival:
    """A request on its way through admission, which fills in the fields without a value.

    `body_hash` tells a client's retry from another request. `account` is that of a minted project's key.
    """

    dialect: Dialect
    wire: WireRequest
    at: float = field(default_factory=time.perf_counter)
    has_session: bool = False  # from here on a refusal can be recorded
    account: KeyAccount | None = None
    is_counted: bool = False  # its bytes are taken of the budgets
    body_hash: str = field(init=False)
    session: LiveSession = field(init=False)
    request: ChatRequest = field(init=False)
    policy: Policy = field(init=False)

    def take_session(self, session: LiveSession) -> None:
        self.session, self.has_session = session, True
