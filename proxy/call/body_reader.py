"""Reads the bodies of model calls: short ones in place, long ones in one thread, so that other calls go on meanwhile.

A body of 40 MB takes a second to parse. `BodyRoom` bounds what one key has of long bodies in memory at a time, from
before their first byte until they are read.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rolltap.errors import RateLimited
from rolltap.proxy.call.arrival import Arrival
from rolltap.proxy.call.value_count import check_values
from rolltap.proxy.conversation.chat import ChatRequest
from rolltap.proxy.dialects.base import Dialect, WireRequest

LONG_BODY = 256 << 10
"""Bytes above which a body is read in the thread: a shorter one takes a few milliseconds."""

Parse = Callable[[Dialect, WireRequest], ChatRequest]
"""Raises `RequestError`."""


class BodyReader:
    """One thread: long bodies wait for one another, and nothing else waits for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-bodies")

    async def read(self, arrival: Arrival, parse: Parse) -> ChatRequest:
        """What `parse` makes of the body, whose hash the arrival gets; `BodyTooLarge` where it has too many values."""
        if len(arrival.wire.body) <= LONG_BODY:
            arrival.body_hash, request = _read(arrival, parse)
        else:
            loop = asyncio.get_running_loop()
            arrival.body_hash, request = await loop.run_in_executor(self._thread, _read, arrival, parse)
        return request


def _read(arrival: Arrival, parse: Parse) -> tuple[str, ChatRequest]:
    body = arrival.wire.body
    check_values(body)
    return hashlib.sha256(body).hexdigest(), parse(arrival.dialect, arrival.wire)


@dataclass(slots=True, eq=False)
class _KeyRoom:
    """Of one key: the bytes that its long bodies take, and those that wait for room, the first of them first."""

    taken: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    def let_in(self, limit: int) -> None:
        """Those that wait enter in their order, as far as there is room."""
        while self.waiting and (self.waiting[0][1].cancelled() or self.taken + self.waiting[0][0] <= limit):
            size, turn = self.waiting.popleft()
            if not turn.cancelled():
                self.taken += size
                turn.set_result(None)


@dataclass(slots=True, eq=False)
class HeldRoom:
    """The bytes that a body takes of its key's room, until they are released."""

    size: int
    _give_back: Callable[[int], None]

    def shrink(self, size: int) -> None:
        """The body is no larger than `size`."""
        given, self.size = self.size - size, size
        self._give_back(given)

    def release(self) -> None:
        """The body is read, or gone. May be called again."""
        self.shrink(0)


class BodyRoom:
    """Room for the long bodies of each key: twice the largest body that it may send."""

    def __init__(self, body_mb: float) -> None:
        self._mb = body_mb
        self._limit = 2 * int(body_mb * 1_000_000)
        self._rooms: dict[int, _KeyRoom] = {}

    async def take(self, key: str, size: int, wait_s: float) -> HeldRoom:
        """Room for `size` bytes; `RateLimited` where the key's other bodies leave none within `wait_s` seconds."""
        hashed = hash(key)  # a vendor's key is not kept
        room = self._rooms.setdefault(hashed, _KeyRoom())
        if room.waiting or room.taken + size > self._limit:
            await self._wait(room, size, wait_s)
        else:
            room.taken += size

        def give_back(size: int) -> None:
            room.taken -= size
            room.let_in(self._limit)
            if not room.taken and not room.waiting:
                self._rooms.pop(hashed, None)

        return HeldRoom(size, give_back)

    async def _wait(self, room: _KeyRoom, size: int, wait_s: float) -> None:
        """Returns when the bytes are taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        room.waiting.append((size, turn))
        try:
            await asyncio.wait([turn], timeout=wait_s)
        finally:
            gave_up = turn.cancel()
            room.let_in(self._limit)  # those behind may be smaller
        if gave_up:
            raise RateLimited(
                f"this key sends {self._limit / 1e6:g} MB in long bodies now, twice limits.body_mb ({self._mb:g}), and "
                f"there was no room for another within {wait_s:g} s; send fewer at once",
                retry_after=1,
            )
