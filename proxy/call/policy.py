"""A model call on its way through admission: its sender, its request and its policy.

The events that a source publishes for a reply: in the proxy's own form, or a vendor's unchanged bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolltap.protocols.base import Dialect, WireRequest
from rolltap.protocols.conversation import ChatRequest, ReplyEvent

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


@dataclass(frozen=True, slots=True)
class RelayedHead:
    """Status and headers of a vendor's reply. A `streamed` reply's head is sent before its first bytes arrive."""

    status: int
    headers: Mapping[str, str]
    streamed: bool


@dataclass(frozen=True, slots=True)
class RelayedBytes:
    """The next bytes of a vendor's reply."""

    data: bytes


CallEvent = ReplyEvent | RelayedHead | RelayedBytes
