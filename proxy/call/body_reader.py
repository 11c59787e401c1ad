"""Parses the bodies of model calls: short ones on the event loop, long ones in a thread, so that other calls continue.

A body of 40 MB takes a second to parse. `BodyRoom` limits the bytes of long bodies that one key may have in memory at a
time, from before their first byte until they are parsed. Time and memory for parsing depend on the number of values
too, not only on the bytes: 3 MB of empty lists take seconds. So the values are counted first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rolltap.errors import BodyTooLarge, RateLimited
from rolltap.protocols.base import Dialect, WireRequest
from rolltap.protocols.conversation import ChatRequest
from rolltap.proxy.call.policy import Arrival

LONG_BODY = 256 << 10
"""Bytes above which a body is parsed in the thread. A shorter one takes a few milliseconds."""

Parse = Callable[[Dialect, WireRequest], ChatRequest]
"""Raises `RequestError`."""


class BodyReader:
    """Parses long bodies in one thread, one after the other. Short bodies do not wait for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-bodies")

    async def read(self, arrival: Arrival, parse: Parse) -> ChatRequest:
        """Parses the body and sets the arrival's `body_hash`. Raises `BodyTooLarge` if it has too many values."""
        if len(arrival.wire.body) <= LONG_BODY:
            arrival.body_hash, request = _read(arrival, parse)
        else:
            loop = asyncio.get_running_loop()
            arrival.body_hash, request = await loop.run_in_executor(self._thread, _read, arrival, parse)
        return request


def _read(arrival: Arrival, parse: Parse) -> tuple[str, ChatRequest]:
    check_values(arrival.wire.body)
    return arrival.wire.body_hash(), parse(arrival.dialect, arrival.wire)


@dataclass(slots=True, eq=False)
class _KeyRoom:
    """The bytes that one key's long bodies use, and the queue of bodies (bytes, future) that wait for room."""

    used: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    def admit_waiting(self, limit: int) -> None:
        """Admits waiting bodies in their order, as long as they fit."""
        while self.waiting and (self.waiting[0][1].cancelled() or self.used + self.waiting[0][0] <= limit):
            size, admitted = self.waiting.popleft()
            if not admitted.cancelled():
                self.used += size
                admitted.set_result(None)


@dataclass(slots=True, eq=False)
class BodyReservation:
    """The bytes that one body reserves of its key's room, until it releases them."""

    size: int
    _give_back: Callable[[int], None]

    def shrink(self, size: int) -> None:
        """Reduces the reservation to `size` bytes."""
        surplus, self.size = self.size - size, size
        self._give_back(surplus)

    def release(self) -> None:
        """Releases all bytes: the body is parsed, or will not come. Safe to call twice."""
        self.shrink(0)


class BodyRoom:
    """Limits each key's long bodies in memory to twice the largest body that it may send."""

    def __init__(self, body_mb: float) -> None:
        self._mb = body_mb
        self._limit = 2 * int(body_mb * 1_000_000)
        self._rooms: dict[int, _KeyRoom] = {}

    async def reserve(self, key: str, size: int, wait_s: float) -> BodyReservation:
        """Reserves `size` bytes.

        Raises `RateLimited` if the key's other bodies leave no room within `wait_s` seconds.
        """
        hashed = hash(key)  # a vendor's key is not stored
        room = self._rooms.setdefault(hashed, _KeyRoom())
        if room.waiting or room.used + size > self._limit:
            await self._wait(room, size, wait_s)
        else:
            room.used += size

        def give_back(size: int) -> None:
            room.used -= size
            room.admit_waiting(self._limit)
            if not room.used and not room.waiting:
                self._rooms.pop(hashed, None)

        return BodyReservation(size, give_back)

    async def _wait(self, room: _KeyRoom, size: int, wait_s: float) -> None:
        """Waits in the key's queue until the bytes are reserved."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        room.waiting.append((size, admitted))
        try:
            await asyncio.wait([admitted], timeout=wait_s)
        finally:
            timed_out = admitted.cancel()
            room.admit_waiting(self._limit)  # the next in the queue may be smaller
        if timed_out:
            raise RateLimited(
                f"this key sends {self._limit / 1e6:g} MB in long bodies now, twice limits.body_mb ({self._mb:g}), and "
                f"there was no room for another within {wait_s:g} s; send fewer at once",
                retry_after=1,
            )


MOST_VALUES = 500_000
"""Limit for a model call's body. 100,000 messages (`protocols.requests.MAX_ITEMS`) fit in it."""

PIECE_BYTES = 256 << 10
"""Bytes scanned in one step. Other threads can run between two steps."""


def check_values(body: bytes) -> None:
    """Raises `BodyTooLarge` for JSON with more than `MOST_VALUES` values."""
    if len(body) > MOST_VALUES and count_values(body, MOST_VALUES) > MOST_VALUES:
        raise BodyTooLarge(f"the request body holds more than {MOST_VALUES:,} values; send fewer at a time")


def count_values(body: bytes, most: int) -> int:
    """The number of values in valid JSON: lists, objects, and their elements. Stops counting above `most`.

    A non-empty list or object has one more element than commas. For invalid JSON the count is meaningless.
    """
    count, is_in_text, cut_escape = 1, False, b""
    for start in range(0, len(body), PIECE_BYTES):
        piece = cut_escape + body[start : start + PIECE_BYTES]
        cut_escape = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)
        piece = piece.removesuffix(cut_escape).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')  # alternately outside and inside of strings
        marks = b'"'.join(parts[is_in_text::2]).translate(None, b" \t\r\n")
        count += marks.count(b",") + marks.count(b"[") + marks.count(b"{") - marks.count(b"[]") - marks.count(b"{}")
        if count > most:
            break
        is_in_text ^= len(parts) % 2 == 0
    return count
