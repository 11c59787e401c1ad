"""A model call on its way through admission: its sender, its request and its policy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolltap.protocols.base import Dialect, WireRequest
from rolltap.protocols.conversation import ChatRequest

if TYPE_CHECKING:
    from rolltap.proxy.call.policies import Policy
    from rolltap.proxy.sessions.key_accounts import KeyAccount
    from rolltap.proxy.sessions.session_cache import LiveSession


@dataclass(eq=False)
class Arrival:
    """A model call. Admission sets the fields that have no default.

    `body_hash` identifies a client's retry. `account` counts the usage of a minted project key.
    """

    dialect: Dialect
    wire: WireRequest
    at: float = field(default_factory=time.perf_counter)
    has_session: bool = False  # `session` is set, so a refusal can be recorded
    account: KeyAccount | None = None
    is_counted: bool = False  # the body's bytes are counted in the budgets
    body_hash: str = field(init=False)
    session: LiveSession = field(init=False)
    request: ChatRequest = field(init=False)
    policy: Policy = field(init=False)

    def set_session(self, session: LiveSession) -> None:
        self.session, self.has_session = session, True
