"""Parsed history items by their bytes.

A harness resends its whole history with every call. `ItemCache` gives the same object for the same bytes, so a
repeated item costs one look-up, its bytes are held once, and what stands behind the dialects can recognise a message
by identity. The parsed values are immutable and carry nothing of who sent them, so sessions may share them. What is
kept is bounded in bytes, whatever clients send.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from typing import Generic, TypeVar

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.proxy.chat import Image, Message
from rolltap.proxy.dialects.reading import within

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ITEM_BYTES = 16 << 20
DERIVED_BYTES = 8 << 20
"""For messages that are made of parsed ones, kept so that equal histories get the same objects."""


class Kept(Generic[K, V]):
    """The least recently used values of at most `limit` bytes in all, as `weigh` counts them."""

    def __init__(self, limit: int, weigh: Callable[[V], int]) -> None:
        self._limit = limit
        self._weigh = weigh
        self._size = 0
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of `key`, made if it is not kept. One that takes over a quarter of the limit is not kept."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
            return value
        value = make(key)
        size = self._weigh(value)
        if size <= self._limit // 4:
            self._entries[key] = value
            self._size += size
            while self._size > self._limit:
                self._size -= self._weigh(self._entries.popitem(last=False)[1])
        return value

    def known(self, keys: Sequence[K]) -> list[V | None]:
        """The value of each key, None where it is not kept. The loops are C's: histories are long."""
        found = list(map(self._entries.get, keys))
        deque(map(self._entries.move_to_end, compress(keys, found)), maxlen=0)
        return found


class ItemCache(Generic[V]):
    """Parsed items. `parse` is pure."""

    def __init__(self, parse: Callable[[bytes], V], limit: int = ITEM_BYTES) -> None:
        self._kept: Kept[bytes, tuple[bytes, V]] = Kept(limit, lambda entry: len(entry[0]))
        self._make = lambda raw: (raw, parse(raw))

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, raw: bytes) -> tuple[bytes, V]:
        """The one copy of these bytes, and what they parse to."""
        return self._kept.get(raw, self._make)

    def all(self, raws: Sequence[msgspec.Raw], where: str) -> tuple[tuple[bytes, ...], list[V]]:
        """The items' bytes and values; a refusal names the item within the list `where`."""
        keys = list(map(bytes, raws))
        entries = self._kept.known(keys)
        for index in [index for index, entry in enumerate(entries) if entry is None]:
            try:
                entries[index] = self.get(keys[index])
            except InvalidRequest as error:
                raise within(error, f"{where}[{index}]") from None
        whole = [entry for entry in entries if entry is not None]
        return tuple([item for item, _ in whole]), [value for _, value in whole]


def message_bytes(message: Message) -> int:
    """About how much a message holds."""
    parts = sum(len(part.url if isinstance(part, Image) else part.text) for part in message.parts)
    return 256 + parts + sum(len(call.arguments) for call in message.tool_calls)
