"""Caches parsed history items by their bytes.

A harness resends its whole history with every call. `ItemCache` returns the same object for the same bytes: a repeated
item costs one look-up, its bytes are held once, and later stages can recognise a message by identity. A long history
that begins with the bytes of a remembered one costs a comparison of bytes and no look-ups. Parsed values are immutable
and hold nothing of their sender, so sessions may share them. All caches share one limit in bytes
(`rolltap.proxy.cache_space`), whatever clients send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from rolltap.errors import InvalidRequest
from rolltap.proxy.cache_space import SHARED, CacheSpace, WeighedCache, json_bytes
from rolltap.proxy.dialects.json_request import entries, within

V = TypeVar("V")

LISTS = 64
LONG = 64
"""Minimum number of items of a list that is remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadList(Generic[V]):
    """A parsed list: its JSON up to the last item (without the closing bracket), and its items.

    `size`: approximate bytes.
    """

    json: bytes
    items: tuple[bytes, ...]
    values: tuple[V, ...]
    size: int

    def rest_of(self, array: bytes) -> bytes | None:
        """Returns the items of `array` that follow these, as a JSON list; None if `array` does not begin with these."""
        size = len(self.json)
        if array[size - 64 : size] != self.json[-64:] or not array.startswith(self.json):
            return None
        rest = array[size:].lstrip()
        if rest == b"]":
            return b"[]"
        return b"[" + rest[1:] if rest.startswith(b",") else None


class ItemCache(Generic[V]):
    """Caches parsed items. `parse` must be pure."""

    def __init__(self, parse: Callable[[bytes], V], space: CacheSpace = SHARED) -> None:
        self._kept: WeighedCache[bytes, tuple[bytes, V]] = WeighedCache(lambda entry: json_bytes(entry[0]), space)
        self._make = lambda raw: (raw, parse(raw))
        self._lists: WeighedCache[int, ReadList[V]] = WeighedCache(lambda read: read.size, space)
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, raw: bytes) -> tuple[bytes, V]:
        """Returns the one copy of these bytes, and their parsed value."""
        return self._kept.get(raw, self._make)

    def all(self, array: bytes, where: str) -> tuple[tuple[bytes, ...], tuple[V, ...]]:
        """Returns a list's items as bytes and as values. Raises `InvalidRequest` with the item's place in `where`."""
        for number, known in self._lists.items():
            if (rest := known.rest_of(array)) is not None:
                items, values = self.each(entries(rest, where, before=len(known.items)), where, len(known.items))
                items, values = known.items + items, known.values + values
                self._lists.pop(number)
                size = known.size + json_bytes(rest)
                break
        else:
            items, values = self.each(entries(array, where), where, 0)
            size = json_bytes(array) if len(items) >= LONG else 0
        if len(items) >= LONG:
            self._lists.put(next(self._numbers), ReadList(array[:-1], items, values, size))
            if len(self._lists) > LISTS:
                self._lists.drop_oldest()
        return items, values

    def each(self, keys: Sequence[bytes], where: str, before: int) -> tuple[tuple[bytes, ...], tuple[V, ...]]:
        """Like `all`, for separate items. `before`: how many items of the list `where` precede them."""
        items = self._kept.known(keys)
        for index in [index for index, entry in enumerate(items) if entry is None]:
            try:
                items[index] = self.get(keys[index])
            except InvalidRequest as error:
                raise within(error, f"{where}[{before + index}]") from None
        pairs = [entry for entry in items if entry is not None]
        return tuple([item for item, _ in pairs]), tuple([value for _, value in pairs])
