"""Parsed history items by their bytes.

A harness resends its whole history with every call. `ItemCache` gives the same object for the same bytes, so a
repeated item costs one look-up, its bytes are held once, and what stands behind the dialects can recognise a message
by identity. A long history that begins with the very bytes of one of the last costs a comparison of bytes and no
look-ups. The parsed values are immutable and carry nothing of who sent them, so sessions may share them. What is kept
is bounded in bytes, whatever clients send.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Generic, TypeVar

from rolltap.errors import InvalidRequest
from rolltap.proxy.conversation.chat import Image, Message
from rolltap.proxy.dialects.json_request import entries, within

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ITEM_BYTES = 16 << 20
DERIVED_BYTES = 8 << 20
"""For messages that are made of parsed ones, kept so that equal histories get the same objects."""

LISTS = 64
LIST_BYTES = 16 << 20
LONG = 64
"""Items from which on a list is worth remembering."""


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


@dataclass(frozen=True, slots=True, eq=False)
class ReadList(Generic[V]):
    """A list that was read: its JSON up to its last item (without the closing bracket), and what was in it."""

    json: bytes
    items: tuple[bytes, ...]
    values: tuple[V, ...]

    def rest_of(self, array: bytes) -> bytes | None:
        """The list of what follows these items in `array`; None if it does not begin with them."""
        size = len(self.json)
        if array[size - 64 : size] != self.json[-64:] or not array.startswith(self.json):
            return None
        rest = array[size:].lstrip()
        if rest == b"]":
            return b"[]"
        return b"[" + rest[1:] if rest.startswith(b",") else None


class ItemCache(Generic[V]):
    """Parsed items. `parse` is pure."""

    def __init__(self, parse: Callable[[bytes], V], limit: int = ITEM_BYTES) -> None:
        self._kept: Kept[bytes, tuple[bytes, V]] = Kept(limit, lambda entry: len(entry[0]))
        self._make = lambda raw: (raw, parse(raw))
        self._lists: deque[ReadList[V]] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, raw: bytes) -> tuple[bytes, V]:
        """The one copy of these bytes, and what they parse to."""
        return self._kept.get(raw, self._make)

    def all(self, array: bytes, where: str) -> tuple[tuple[bytes, ...], tuple[V, ...]]:
        """The items of a list, their bytes and values; a refusal names the item within the list `where`."""
        for known in self._lists:
            if (rest := known.rest_of(array)) is not None:
                items, values = self.each(entries(rest, where, before=len(known.items)), where, len(known.items))
                items, values = known.items + items, known.values + values
                self._lists.remove(known)
                break
        else:
            items, values = self.each(entries(array, where), where, 0)
        if len(items) >= LONG and len(array) <= LIST_BYTES // 4:
            self._remember(ReadList(array[:-1], items, values))
        return items, values

    def each(self, keys: Sequence[bytes], where: str, before: int) -> tuple[tuple[bytes, ...], tuple[V, ...]]:
        """The items by themselves; `before` others of the list `where` have been read."""
        found = self._kept.known(keys)
        for index in [index for index, entry in enumerate(found) if entry is None]:
            try:
                found[index] = self.get(keys[index])
            except InvalidRequest as error:
                raise within(error, f"{where}[{before + index}]") from None
        whole = [entry for entry in found if entry is not None]
        return tuple([item for item, _ in whole]), tuple([value for _, value in whole])

    def _remember(self, read: ReadList[V]) -> None:
        self._lists.appendleft(read)
        while len(self._lists) > LISTS or sum(len(known.json) for known in self._lists) > LIST_BYTES:
            self._lists.pop()


def message_bytes(message: Message) -> int:
    """About how much a message holds."""
    parts = sum(len(part.url if isinstance(part, Image) else part.text) for part in message.parts)
    return 256 + parts + sum(len(call.arguments) for call in message.tool_calls)
