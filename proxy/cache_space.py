"""The memory that the caches of a process take together.

A cache weighs what it keeps, and drops what was unused longest. All caches share a `CacheSpace`: where they hold more
than its limit together, the largest of them drops entries, so who fills one cache loses what is in that cache. A
weight is about the most that Python needs for an entry, whatever clients send; two caches that hold the same object
both count it. Caches may be used in several threads: one lock guards all that share a space. A value is made and
weighed outside of it, so two threads may make the same one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from sys import getsizeof
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from rolltap.proxy.conversation.chat import Image, Message

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

CACHE_BYTES = 256_000_000

LARGEST = 8
"""The part of the limit over which an entry is not kept."""

ENTRY_BYTES = 600
"""Of every entry: its place and key, and the objects around what it holds."""

STRUCTURE_BYTES = 64
"""Of every value in parsed JSON; before each stands one of `STRUCTURE`."""

STRUCTURE = b",:[{"


class CacheSpace:
    """What the caches that are made with it may hold together: `limit` bytes."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self.lock = RLock()
        self._size = 0
        self._caches: WeakSet[Kept[Any, Any]] = WeakSet()

    @property
    def size(self) -> int:
        with self.lock:
            return sum(cache.size for cache in self._caches)

    def add(self, cache: Kept[Any, Any]) -> None:
        with self.lock:
            self._caches.add(cache)

    def give(self, size: int) -> None:
        """A cache has shrunk by `size` bytes. Its thread holds the lock."""
        self._size -= size

    def take(self, size: int) -> None:
        """A cache has grown by `size` bytes: the largest drop what is over the limit. Its thread holds the lock."""
        self._size += size
        if self._size > self.limit:
            self._size = self.size  # without caches that are gone
            while self._size > self.limit:
                max(self._caches, key=lambda cache: cache.size).drop_oldest()


SHARED = CacheSpace()
"""Of this process. Dialects, which hold caches, are made when they are imported; `limits.cache_mb` comes later."""


class Kept(Generic[K, V]):
    """Values by key, as many as the space has room for. `weigh` gives a value's bytes beside `ENTRY_BYTES`."""

    def __init__(self, weigh: Callable[[V], int], space: CacheSpace = SHARED) -> None:
        self._weigh = weigh
        self._space = space
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._sizes: dict[K, int] = {}
        self.size = 0
        space.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of `key`, made if it is not kept."""
        with self._space.lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
                return value
        value = make(key)
        self.put(key, value)
        return value

    def peek(self, key: K) -> V | None:
        """The value of `key` if it is kept; it is not more recently used for that."""
        return self._entries.get(key)

    def known(self, keys: Sequence[K]) -> list[V | None]:
        """The value of each key, None where it is not kept. The loops are C's: histories are long."""
        with self._space.lock:
            entries = list(map(self._entries.get, keys))
            deque(map(self._entries.move_to_end, compress(keys, entries)), maxlen=0)
            return entries

    def put(self, key: K, value: V) -> None:
        """Keeps a value in the place of a former one, unless it is too large."""
        size = ENTRY_BYTES + self._weigh(value)
        with self._space.lock:
            self.pop(key)
            if size <= self._space.limit // LARGEST:
                self._entries[key] = value
                self._sizes[key] = size
                self.size += size
                self._space.take(size)

    def pop(self, key: K) -> V | None:
        """Takes a value out, if it is there."""
        with self._space.lock:
            value = self._entries.pop(key, None)
            if value is not None:
                self._shrink(key)
            return value

    def drop_oldest(self) -> None:
        """Drops the longest unused one. There is one."""
        with self._space.lock:
            self._shrink(self._entries.popitem(last=False)[0])

    def items(self) -> list[tuple[K, V]]:
        """All values with their keys, the most recently used first."""
        with self._space.lock:
            return list(reversed(self._entries.items()))

    def _shrink(self, key: K) -> None:
        size = self._sizes.pop(key)
        self.size -= size
        self._space.give(size)


def json_bytes(raw: bytes) -> int:
    """About the most that a piece of JSON and what is parsed of it take."""
    is_wide = not raw.isascii() or b"\\u" in raw  # one wide character makes four bytes of every one of its text
    return (5 if is_wide else 2) * len(raw) + STRUCTURE_BYTES * values_in(raw)


def values_in(raw: bytes) -> int:
    """About the most values that a piece of JSON may hold, without parsing it: text may have such characters, too."""
    return len(raw) - len(raw.translate(None, STRUCTURE))


def message_bytes(message: Message) -> int:
    """About how much a message holds."""
    parts = sum(getsizeof(part.url if isinstance(part, Image) else part.text) for part in message.parts)
    calls = sum(getsizeof(call.arguments) + getsizeof(call.name) + getsizeof(call.id) for call in message.tool_calls)
    return 256 + parts + calls + 128 * (len(message.parts) + len(message.tool_calls))
