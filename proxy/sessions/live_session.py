"""A session in use: its forest, its requests in flight, and what is counted of it in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rolltap.errors import RateLimited
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.sessions.key_accounts import KeyAccount
from rolltap.proxy.sessions.recording import Recording
from rolltap.types import Session
from rolltap.wording import counted

UNDELIVERED_KEPT = 8


class KeptRequest(Protocol):
    """A request in flight (`rolltap.proxy.call.in_flight`), as far as its session knows it."""

    body_hash: str
    over: bool


@dataclass(slots=True, eq=False, weakref_slot=True)
class LiveSession:
    """A session with its forest. The `planning` lock is held from the search in the forest until the call is added."""

    session: Session
    forest: Forest
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    in_flight: int = 0
    refused_turns: int = 0
    received_bytes: int = 0
    bucket_full_at: float = 0.0  # monotonic time when the token bucket for the rate is full again
    requests: dict[str, KeptRequest] = field(default_factory=dict)  # by the hash of the body
    trusted_until: float = 0.0  # on the monotonic clock
    account: KeyAccount | None = None  # of its minted project key
    weighed: int = 0  # its part of the cache's size, in bytes
    recording: Recording | None = None  # the recorded session that answers this one's calls
    hashed_key: int = 0  # `hash` of its API key, by which dialects cache requests; 0 before the first call with it

    @contextmanager
    def slot(self, limit: int) -> Iterator[None]:
        """Counts a call in flight. Raises `RateLimited` if the session has `limit` of them."""
        if self.in_flight >= limit:
            raise RateLimited(f"this key has {counted(limit, 'call')} in flight", retry_after=1)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def keep(self, request: KeptRequest) -> None:
        """Keeps a request for a retry. Of finished requests only the last few are kept."""
        self.requests[request.body_hash] = request
        over = [body_hash for body_hash, other in self.requests.items() if other.over]
        for body_hash in over[:-UNDELIVERED_KEPT]:
            del self.requests[body_hash]

    def drop(self, request: KeptRequest) -> None:
        """Removes a request: it can no longer be joined by a retry."""
        if self.requests.get(request.body_hash) is request:
            del self.requests[request.body_hash]
