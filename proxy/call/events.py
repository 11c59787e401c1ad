"""The events that a source publishes for a reply: in the proxy's own form, or a vendor's unchanged bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolltap.protocols.conversation import ReplyEvent


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
