"""The canonical form of messages: what must be equal for a resent history to be the recorded one.

Harnesses re-serialise what they echo. Two messages are the same when they differ only in

* JSON arguments: key order, spacing, escapes, `1.0` against `1`; a member that was cut off;
* tool-call ids and item ids (they are handles, compared where they are found);
* an assistant's text: white space at its edges; empty against absent; one string against parts;
* another's text: one string of lines against one part a line;
* thinking that the client dropped, or whose edges it trimmed (`reasoning_agrees`);
* `developer` against `system`;
* text that the policy declares as volatile (`policies.NAME.ignore`), but for an assistant's.

Everything else that differs is an edit. A conversation is hashed incrementally: the chain digest after message i is
`H(chain digest before it, digest of message i)`. Tools and leading system text are the frame around it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from rolltap.proxy.conversation.chat import Image, Message, Tool
from rolltap.proxy.conversation.partial_json import whole_members

DIGEST_BYTES = 16


def canonical_arguments(text: str) -> str:
    """JSON text with sorted keys and no spacing (none at all is an empty object).

    An object that was cut off stands for the members that it has whole; other text that is not JSON is stripped.
    """
    try:
        return _sorted(json.loads(text or "{}"))
    except RecursionError:
        return text.strip()
    except ValueError:
        members = whole_members(text)
    return _sorted(members) if members is not None else text.strip()


def _sorted(value: Any) -> str:
    return json.dumps(_integral(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _integral(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _integral(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integral(item) for item in value]
    return value


def message_digest(message: Message, ignored: Sequence[re.Pattern[str]] = ()) -> bytes:
    """16 bytes that are equal for messages that mean the same. Text that `ignored` matches does not count."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    assistant = message.role == "assistant"
    role = "system" if message.role == "developer" else message.role
    hasher.update(role.encode())
    text = message.text.strip() if assistant else message.text
    if not assistant:
        for pattern in ignored:
            text = pattern.sub("", text)
    _field(hasher, text)
    for part in message.parts:
        if isinstance(part, Image):
            _field(hasher, part.url)
    for call in message.tool_calls:
        _field(hasher, call.name)
        _field(hasher, canonical_arguments(call.arguments) if call.kind == "function" else call.arguments.strip())
    return hasher.digest()


def _field(hasher: blake2b, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    hasher.update(len(data).to_bytes(8, "little"))
    hasher.update(data)


def tools_digest(policy: str, tools: Sequence[Tool]) -> bytes:
    """16 bytes of the policy (its tokenizer and template) and the tool schemas in their order."""
    hasher = blake2b(policy.encode(), digest_size=DIGEST_BYTES)
    for tool in tools:
        hasher.update(msgspec.json.encode(tool, order="sorted"))
    return hasher.digest()


def extend_chain(digest: bytes, message: bytes) -> bytes:
    """The chain digest after one more message."""
    return blake2b(digest + message, digest_size=DIGEST_BYTES).digest()


def chain(seed: bytes, digests: Iterable[bytes]) -> list[bytes]:
    """The chain digests after each message; `chain(...)[i]` covers messages `[0, i]`."""
    out: list[bytes] = []
    for digest in digests:
        seed = extend_chain(seed, digest)
        out.append(seed)
    return out


def reasoning_agrees(echoed: str, recorded: str) -> bool:
    """Whether thinking that a client sent back is the recorded one: dropped, trimmed or equal."""
    return not echoed.strip() or echoed.strip() == recorded.strip()


class DigestCache:
    """Digests of messages that recur. Dialects hand out one object per distinct history item, so identity is the key.

    Holds messages of at most `capacity` characters in all, so an id can't be reused while it is a key. `ignored` is
    what does not count in the messages of a policy.
    """

    def __init__(
        self, ignored: Mapping[str, Sequence[re.Pattern[str]]] | None = None, capacity: int = 64_000_000
    ) -> None:
        self._ignored = ignored or {}
        self._capacity = capacity
        self._held = 0
        self._entries: OrderedDict[int | tuple[int, str], tuple[Message, bytes, int]] = OrderedDict()

    def digest(self, message: Message, policy: str = "") -> bytes:
        ignored = self._ignored.get(policy, ())
        key = (id(message), policy) if ignored else id(message)
        entry = self._entries.get(key)
        if entry is not None:
            return entry[1]
        digest = message_digest(message, ignored)
        size = 256 + len(message.text) + sum(len(call.arguments) for call in message.tool_calls)
        self._entries[key] = (message, digest, size)
        self._held += size
        while self._held > self._capacity:
            self._held -= self._entries.popitem(last=False)[1][2]
        return digest
