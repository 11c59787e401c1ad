"""Caches parsed requests, so that parsing the next one costs its new items, not its history.

A harness resends its whole history with every call. `ItemCache` returns the same object for the same bytes: a repeated
item costs one look-up, its bytes are held once, and later stages can recognise a message by identity. A long history
that begins with the bytes of a remembered one costs a comparison of bytes and no look-ups. Parsed values are immutable
and hold nothing of their sender, so sessions may share them.

`RequestCache` keeps the last requests of each API key, as the rest of the body seldom changes either. If a body equals
a known one up to the last item of the known history, and again from the end of that list on, it differs only by the
items in between. Only those are decoded; the rest costs a comparison of bytes. A known request is used only for a body
that repeats all of it, so it does not matter who sent it.

All caches share one limit in bytes (`rolltap.protocols.cache_space`), whatever clients send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import msgspec

from rolltap.decoding import from_json
from rolltap.errors import InvalidRequest
from rolltap.protocols.cache_space import ENTRY_BYTES, LARGEST, CacheSpace, WeighedCache, json_bytes
from rolltap.protocols.conversation import ChatRequest
from rolltap.protocols.history import LinkedHistory
from rolltap.protocols.requests import check_utf8, entries, within

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

    def __init__(self, parse: Callable[[bytes], V], space: CacheSpace) -> None:
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


PER_KEY = 4
"""Requests kept per key: subagents share the key of the main agent, and their calls alternate with its calls."""

PROBE = 32
"""Bytes at the end of a history that are compared first: if they differ, nothing else is compared."""


@dataclass(slots=True, eq=False)
class KnownRequest:
    """A parsed request. Its history is the JSON list `array` in `body`.

    The body is split at the first full comparison, as many sessions make only one request. Two threads may do so at
    once: the halves are set in one step.
    """

    chat: ChatRequest
    linked: LinkedHistory
    body: bytes = b""
    array: bytes = b""
    halves: tuple[bytes, bytes] | None = None  # the body up to the end of the last item, and from the list's end on
    size: int = 0  # approximate bytes: its body, the body's items and their parsed values

    def __post_init__(self) -> None:
        self.size = self.size or 2 * json_bytes(self.body)

    def extended(self, chat: ChatRequest, linked: LinkedHistory, body: bytes) -> KnownRequest:
        """Returns the request `chat`, whose `body` extends this one's."""
        assert self.halves is not None  # `added_items` has split it
        before, after = self.halves
        end = len(body) - len(after)
        size = self.size + 2 * json_bytes(body[len(before) : end])
        return KnownRequest(chat, linked, halves=(body[:end].rstrip(), after), size=size)

    def added_items(self, body: bytes, field: str) -> list[bytes] | None:
        """Returns the items that `body` adds to the history; None if it differs in anything else."""
        halves = self.halves or self._split(body, field)
        if halves is None:
            return None
        before, after = halves
        end = len(body) - len(after)
        if end < len(before) or not body.startswith(before) or not body.endswith(after):
            return None
        added = body[len(before) : end].strip()
        if not added:
            return []
        # `before` ends in an item, so what follows is a comma and items. Only then is the whole body valid JSON.
        if not added.startswith(b",") or len(added) == 1:
            return None
        try:
            check_utf8(added)
            return entries(b"[" + added[1:] + b"]", field, before=len(self.chat.items))
        except InvalidRequest:
            return None  # the caller parses the whole body, so that the error names the item's place in it

    def _split(self, other: bytes, field: str) -> tuple[bytes, bytes] | None:
        """Splits the body at the end of its history if `other` may extend it. Returns None if that is not certain."""
        body, array = self.body, self.array
        probe = body.rfind(array[-PROBE:])
        if other[probe : probe + PROBE - 1] != array[-PROBE:-1]:
            return None
        start = body.find(array)
        end = start + len(array)
        # The same bytes may also occur elsewhere. This is the history if the field is empty without them.
        try:
            rest = from_json(body[:start] + b"[]" + body[end:], dict[str, msgspec.Raw])
        except msgspec.MsgspecError:
            return None
        if bytes(rest.get(field, b"")) != b"[]":
            return None
        self.halves = body[: end - 1].rstrip(), body[end - 1 :]
        self.body = self.array = b""
        return self.halves


class RequestCache:
    """The last requests by API key. `field` is the history's field."""

    def __init__(self, field: str, space: CacheSpace) -> None:
        self._field = field
        self._space = space
        # By the key's hash: a vendor's key must not be held longer than its request.
        self._by_key: WeighedCache[int, list[KnownRequest]] = WeighedCache(_size, space)

    def extended(self, key: str | None, body: bytes) -> tuple[KnownRequest, list[bytes]] | None:
        """Returns the longest known request that `body` extends, and the items that it adds; None without one."""
        longest: tuple[KnownRequest, list[bytes]] | None = None
        for known in self._by_key.peek(hash(key)) or ():
            if longest is None or len(known.chat.items) > len(longest[0].chat.items):
                items = known.added_items(body, self._field)
                if items is not None:
                    longest = known, items
        return longest

    def keep(self, key: str | None, known: KnownRequest, former: KnownRequest | None) -> None:
        """Stores a request in place of the one that it extends."""
        others = [other for other in self._by_key.peek(hash(key)) or () if other is not former]
        requests = [known, *others[: PER_KEY - 1]]
        while len(requests) > 1 and _size(requests) > self._space.limit // LARGEST - ENTRY_BYTES:
            requests.pop()
        self._by_key.put(hash(key), requests)

    def release(self, hashed_key: int) -> None:
        """Drops the requests of an API key, given by its `hash`."""
        self._by_key.pop(hashed_key)


def _size(requests: Sequence[KnownRequest]) -> int:
    return sum([known.size for known in requests])
