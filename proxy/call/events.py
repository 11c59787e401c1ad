"""What a source publishes of a reply: events in the proxy's own form, or a vendor's bytes as they came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolltap.proxy.conversation.chat import ReplyEvent


@dataclass(frozen=True, slots=True)
class RelayedHead:
    """Status and headers of a vendor's reply. The head of one that is `streamed` does not wait for its first bytes."""

    status: int
    headers: Mapping[str, str]
    streamed: bool


@dataclass(frozen=True, slots=True)
class RelayedBytes:
    """The next bytes of a vendor's reply."""

    data: bytes


CallEvent = ReplyEvent | RelayedHead | RelayedBytes
