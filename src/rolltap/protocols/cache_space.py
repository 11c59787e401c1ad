"""Limits the memory of all caches of a proxy together.

Each cache is an LRU with weighed entries. All caches share a `CacheSpace`. If their total is over its limit, the
largest cache drops entries, so a client that fills one cache loses entries of that cache. A weight is an upper estimate
of the bytes that Python needs for an entry; two caches with the same object both count it. Caches are thread-safe: one
lock guards all caches of a space. Values are made and weighed outside the lock, so two threads may make the same value.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from sys import getsizeof
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from rolltap.decoding import values_in
from rolltap.protocols.conversation import Image, Message

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

CACHE_BYTES = 256_000_000

LARGEST = 8
"""The share of the limit above which an entry is not cached."""

SHARES = 64
"""The share of the limit that an eviction frees, at least."""

ENTRY_BYTES = 600
"""Estimated bytes of an entry without its value."""

STRUCTURE_BYTES = 64
"""Estimated bytes of a value in parsed JSON."""


class CacheSpace:
    """A common limit of `limit` bytes for the caches that are created with it."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self.lock = RLock()
        self._size = 0
        self._caches: WeakSet[WeighedCache[Any, Any]] = WeakSet()

    @property
    def size(self) -> int:
        with self.lock:
            return sum(cache.size for cache in self._caches)

    def add(self, cache: WeighedCache[Any, Any]) -> None:
        with self.lock:
            self._caches.add(cache)

    def shrink(self, size: int) -> None:
        """Notes that a cache has shrunk by `size` bytes. Call it with the lock held."""
        self._size -= size

    def grow(self, size: int) -> None:
        """Notes that a cache has grown by `size` bytes. Over the limit, it evicts so much that looking at all caches
        is rare. Call it with the lock held."""
        self._size += size
        if self._size > self.limit:
            self._size = self.size  # exclude caches that no longer exist
            share = self.limit // SHARES
            while self._size > self.limit - share:
                largest = max(self._caches, key=lambda cache: cache.size)
                left = max(largest.size - share, 0)
                while largest.size > left:
                    largest.drop_oldest()


class WeighedCache(Generic[K, V]):
    """An LRU cache in a `CacheSpace`. `weigh` returns a value's bytes, without `ENTRY_BYTES`."""

    def __init__(self, weigh: Callable[[V], int], space: CacheSpace) -> None:
        self._weigh = weigh
        self._space = space
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._sizes: dict[K, int] = {}
        self.size = 0
        space.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The cached value of `key`, or a new one from `make`."""
        with self._space.lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
                return value
        value = make(key)
        self.put(key, value)
        return value

    def peek(self, key: K) -> V | None:
        """The cached value of `key`, or None. Does not count as a use."""
        return self._entries.get(key)

    def known(self, keys: Sequence[K]) -> list[V | None]:
        """The cached value of each key, or None. The loops run in C, as histories are long."""
        with self._space.lock:
            entries = list(map(self._entries.get, keys))
            deque(map(self._entries.move_to_end, compress(keys, entries)), maxlen=0)
            return entries

    def put(self, key: K, value: V) -> None:
        """Stores a value, unless it is too large. Replaces the previous value."""
        size = ENTRY_BYTES + self._weigh(value)
        with self._space.lock:
            self.pop(key)
            if size <= self._space.limit // LARGEST:
                self._entries[key] = value
                self._sizes[key] = size
                self.size += size
                self._space.grow(size)

    def pop(self, key: K) -> V | None:
        """Removes and returns a value, if it is cached."""
        with self._space.lock:
            value = self._entries.pop(key, None)
            if value is not None:
                self._forget_size(key)
            return value

    def drop_oldest(self) -> None:
        """Drops the least recently used entry. The cache must not be empty."""
        with self._space.lock:
            self._forget_size(self._entries.popitem(last=False)[0])

    def items(self) -> list[tuple[K, V]]:
        """All values with their keys, the most recently used first."""
        with self._space.lock:
            return list(reversed(self._entries.items()))

    def _forget_size(self, key: K) -> None:
        size = self._sizes.pop(key)
        self.size -= size
        self._space.shrink(size)


def json_bytes(raw: bytes) -> int:
    """An upper estimate of the bytes of a piece of JSON and its parsed value."""
    is_wide = not raw.isascii() or b"\\u" in raw  # one wide character makes four bytes of every one of its text
    return (5 if is_wide else 2) * len(raw) + STRUCTURE_BYTES * values_in(raw)


def message_bytes(message: Message) -> int:
    """The estimated bytes of a message."""
    parts = sum(getsizeof(part.url if isinstance(part, Image) else part.text) for part in message.parts)
    calls = sum(getsizeof(call.arguments) + getsizeof(call.name) + getsizeof(call.id) for call in message.tool_calls)
    return 256 + parts + calls + 128 * (len(message.parts) + len(message.tool_calls))
