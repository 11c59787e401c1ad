"""Caches the last requests of each API key: parsing the next request then costs its new items, not its history.

A harness resends its whole history with every call, and the rest of the body seldom changes. If a body equals a known
one up to the last item of the known history, and again from the end of that list on, it differs only by the items in
between. Only those are decoded; the rest costs a comparison of bytes. A known request is used only for a body that
repeats all of it, so it does not matter who sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rolltap.decoding import from_json
from rolltap.errors import InvalidRequest
from rolltap.proxy.cache_space import ENTRY_BYTES, LARGEST, SHARED, CacheSpace, WeighedCache, json_bytes
from rolltap.proxy.conversation.chat import ChatRequest
from rolltap.proxy.dialects.history import LinkedHistory
from rolltap.proxy.dialects.json_request import check_utf8, entries

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

    def __init__(self, field: str, space: CacheSpace = SHARED) -> None:
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
