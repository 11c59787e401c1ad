"""Prompt ids as JSON for engines, encoded incrementally and compared as bytes.

Converting 100,000 ids to Python integers takes milliseconds, and so does parsing them from an engine that echoes them.
So a prompt's JSON is its parent's JSON plus that of its new ids, and an echoed prompt is compared as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, overload
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from rolltap.decoding import json_decoder
from rolltap.errors import EngineProtocolError
from rolltap.protocols.cache_space import CacheSpace, WeighedCache
from rolltap.types import Int32

NULL = b"null"
NOT_ECHOED = msgspec.Raw(NULL)
DIGEST_BYTES = 16

_read_ids = json_decoder(list[int] | None)


class EncodedPrompt(Sequence[int]):
    """A prompt's ids [P], and the JSON list of them."""

    __slots__ = ("__weakref__", "ids", "json")

    def __init__(self, ids: Int32, json: bytes) -> None:
        self.ids = ids
        self.json = json

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self.ids[at].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())


class Prompts:
    """Encodes prompts by extending their parents' JSON, which a bounded cache keeps by call id.

    Prompts that continue none and are equal, as those of a group's rollouts are, share one object.
    """

    def __init__(self, space: CacheSpace | None = None) -> None:
        self.kept: WeighedCache[str, EncodedPrompt] = WeighedCache(
            lambda prompt: len(prompt.json) + prompt.ids.nbytes, space or CacheSpace()
        )
        self._first_by_digest: WeakValueDictionary[bytes, EncodedPrompt] = WeakValueDictionary()

    def make(self, call_id: str, ids: Int32, parent: str | None = None) -> EncodedPrompt:
        """The prompt of a call. It replaces that of `parent` in the cache."""
        if not len(ids):
            return EncodedPrompt(ids, _encoded(ids))
        former = self.kept.pop(parent) if parent is not None else None
        size = len(former) if former is not None else 0
        if former is not None and size and np.array_equal(former.ids, ids[:size]):
            json = former.json[:-1] + b"," + _encoded(ids[size:])[1:] if size < len(ids) else former.json
            prompt = EncodedPrompt(ids, json)
        else:
            digest = blake2b(np.ascontiguousarray(ids).data, digest_size=DIGEST_BYTES).digest()
            prompt = self._first_by_digest.get(digest)
            if prompt is None:
                prompt = self._first_by_digest[digest] = EncodedPrompt(ids, _encoded(ids))
        self.kept.put(call_id, prompt)
        return prompt

    def release(self, call_ids: Iterable[str]) -> None:
        """Drops the prompts of calls whose session has ended."""
        for call_id in call_ids:
            self.kept.pop(call_id)


def written(value: Any) -> msgspec.Raw:
    """msgspec's `enc_hook` for prompts."""
    if isinstance(value, EncodedPrompt):
        return msgspec.Raw(value.json)
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


def echoed_ids(json: msgspec.Raw, sent: Sequence[int]) -> Sequence[int] | None:
    """The prompt ids that an engine echoes, or None if it does not. An equal prompt is returned as `sent` itself.

    Raises `EngineProtocolError` if the echo is not a list of ids.
    """
    if json is NOT_ECHOED or (told := bytes(json)) == NULL:  # as nearly every event
        return None
    if isinstance(sent, EncodedPrompt) and told == sent.json:
        return sent
    try:
        return _read_ids.decode(told)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineProtocolError(f"the engine echoed a prompt that is not a list of ids: {error}") from error


def _encoded(ids: Int32) -> bytes:
    return msgspec.json.encode(ids.tolist())
