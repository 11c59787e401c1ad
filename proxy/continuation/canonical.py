"""Digests of messages in canonical form. A resent history matches the record if the digests are equal.

Harnesses re-serialise the messages that they send back. Two messages are equal if they differ only in

* JSON arguments: key order, spacing, escapes, a number's notation (`1.0`, `1`, `1e0`); a member that was cut off;
* tool-call ids and item ids (they are handles, which are compared separately), but a result must answer the call at the
  same place;
* an assistant's text: white space at its edges; empty or absent; one string or parts;
* other roles' text: one string of lines, or one part a line, but not across an image;
* thinking that the client dropped or trimmed (`thought_digest`);
* the role `developer` or `system`;
* text that the policy declares as volatile (`policies.NAME.ignore`), except in assistant messages.

Any other difference is an edit. A reply that a client sends back in several messages is joined before it is hashed
(`turns`). A conversation is hashed incrementally: the chain digest after message i is
`H(chain digest before it, digest of message i)`. The tools, the leading system text and the effort level are not in the
chain; they are the frame.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from itertools import count
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from rolltap.protocols.cache_space import ENTRY_BYTES, CacheSpace, WeighedCache, json_bytes, message_bytes
from rolltap.protocols.contents import whole_members
from rolltap.protocols.conversation import ChatRequest, Image, Message, Text, Tool

DIGEST_BYTES = 16


def canonical_arguments(text: str) -> str:
    """JSON text with sorted keys and no spacing. Empty text counts as an empty object.

    An object that was cut off is reduced to its complete members. Other text that is not JSON is stripped.
    """
    try:
        return _sorted(json.loads(text or "{}", parse_float=_finite))
    except RecursionError:
        return text.strip()
    except ValueError:
        members = whole_members(text)
    return _sorted(members) if members is not None and _is_finite(members) else text.strip()


def _sorted(value: Any) -> str:
    return json.dumps(_integral(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or isfinite(value)


def _finite(text: str) -> float:
    """A number with a fraction or an exponent. Those beyond a float's range are not compared by value."""
    value = float(text)
    if not isfinite(value):
        raise ValueError("beyond a float's range")
    return value


def _integral(value: Any) -> Any:
    """Floats that are whole numbers as integers: `1e23` is the integer 10^23, not the float's binary value."""
    if isinstance(value, float) and value.is_integer():
        return int(Decimal(repr(value)))
    if isinstance(value, dict):
        return {key: _integral(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integral(item) for item in value]
    return value


def message_digest(message: Message, ignored: Sequence[re.Pattern[str]] = ()) -> bytes:
    """A 16-byte digest that is equal for equal messages. Text that matches `ignored` does not count."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    assistant = message.role == "assistant"
    role = "system" if message.role == "developer" else message.role
    hasher.update(role.encode())
    text = message.text.strip() if assistant else message.text
    if not assistant:
        for pattern in ignored:
            text = pattern.sub("", text)
    _field(hasher, text)
    texts = [place for place, part in enumerate(message.parts) if isinstance(part, Text) and part.text]
    for at, part in enumerate(message.parts):
        if isinstance(part, Image):
            _field(hasher, part.url)
            if (before := bisect(texts, at)) < len(texts):
                _field(hasher, f"before text {before}")
    for call in message.tool_calls:
        _field(hasher, call.name)
        _field(hasher, canonical_arguments(call.arguments) if call.kind == "function" else call.arguments.strip())
    if message.call_offset:
        _field(hasher, f"call {message.call_offset:+d}")
    return hasher.digest()


def _field(hasher: blake2b, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    hasher.update(len(data).to_bytes(8, "little"))
    hasher.update(data)


def tools_digest(policy: str, tools: Sequence[Tool]) -> bytes:
    """A 16-byte digest of the policy's name and the tool schemas in their order."""
    hasher = blake2b(policy.encode(), digest_size=DIGEST_BYTES)
    for tool in tools:
        hasher.update(msgspec.json.encode(tool, order="sorted"))
    return hasher.digest()


def extend_chain(digest: bytes, message: bytes) -> bytes:
    """The chain digest after one more message digest."""
    return blake2b(digest + message, digest_size=DIGEST_BYTES).digest()


def chain(seed: bytes, digests: Iterable[bytes]) -> list[bytes]:
    """The chain digests after each message; `chain(...)[i]` covers messages `[0, i]`."""
    out: list[bytes] = []
    for digest in digests:
        seed = extend_chain(seed, digest)
        out.append(seed)
    return out


def thought_digest(message: Message) -> bytes:
    """A 16-byte digest of the message's thinking, stripped; empty if the message has none."""
    thought = message.reasoning.strip()
    return blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest() if thought else b""


class CachedOutline(NamedTuple):
    """An outline of a request, and what it holds for. `frame_bytes` is the size of the request's tools and system."""

    policy: str
    request: ChatRequest
    outline: Any  # an `Outline` of forest.py, which imports this module
    effort: str
    frame_bytes: int
    loads: int = 0  # how often calls were loaded from the log before it was made


class DigestCache:
    """Caches message digests by object identity, as dialects return one object per distinct history item.

    The cache holds the messages, so an id cannot be reused while it is a key. `ignored`: volatile text by policy.
    `outlines` caches the outlines of the last requests for the forests.
    """

    def __init__(
        self, ignored: Mapping[str, Sequence[re.Pattern[str]]] | None = None, space: CacheSpace | None = None
    ) -> None:
        self._ignored = ignored or {}
        space = space or CacheSpace()
        self._entries: WeighedCache[int | tuple[int, str], tuple[Message, tuple[bytes, bytes]]] = WeighedCache(
            lambda entry: message_bytes(entry[0]), space
        )
        self.outlines: WeighedCache[int, CachedOutline] = WeighedCache(
            lambda entry: entry.frame_bytes + _request_bytes(entry.request), space
        )
        self._numbers = count()

    def keep_outline(self, entry: CachedOutline) -> int:
        """Stores an outline; returns its key in `outlines`."""
        number = next(self._numbers)
        self.outlines.put(number, entry)
        return number

    def digests(self, message: Message, policy: str = "") -> tuple[bytes, bytes]:
        """The digest of the message without its thinking, and the digest of its thinking."""
        ignored = self._ignored.get(policy, ())
        key = (id(message), policy) if ignored else id(message)
        entry = self._entries.peek(key)
        if entry is not None:
            return entry[1]
        digests = message_digest(message, ignored), thought_digest(message)
        self._entries.put(key, (message, digests))
        return digests


def frame_bytes(request: ChatRequest) -> int:
    """The estimated bytes of a request's tools and system texts."""
    return sum(map(json_bytes, request.fixed.values()))


def _request_bytes(request: ChatRequest) -> int:
    """The estimated bytes of the rest, without parsing the history: parsed items take up to five times their bytes."""
    return 5 * (len(request.head) + sum(map(len, request.items))) + ENTRY_BYTES * len(request.messages)
