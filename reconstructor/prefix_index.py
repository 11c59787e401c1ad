"""Finds the recorded contexts that are prefixes of a prompt.

A context is a call's prompt and output. Hashes of all prefixes of a prompt cost one pass; they are looked up at the
lengths of recorded contexts, the longest first. A hash only proposes: the caller compares tokens, so that a collision
costs time and never correctness. Hashes are made when they are first needed: a session whose calls name their parents
needs none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rolltap.types import Call, Int32

_SEED = 0x726F6C6C746170


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A call in the forest. `context_hash` covers prompt and output; None until it is needed."""

    call: Call
    parent: PrefixNode | None = None
    children: list[PrefixNode] = field(default_factory=list)
    context_hash: int | None = None

    @property
    def id(self) -> str:
        return self.call.id

    @property
    def length(self) -> int:
        """P + T of the call."""
        return self.call.context_length

    def path(self) -> list[PrefixNode]:
        """From the root to this node."""
        node: PrefixNode = self
        steps: list[PrefixNode] = [node]
        while node.parent is not None:
            node = node.parent
            steps.append(node)
        steps.reverse()
        return steps


class PrefixIndex:
    """The contexts of a session's calls."""

    def __init__(self) -> None:
        self._lengths: list[int] = []  # one a context, sorted
        self._by_hash: dict[int, list[PrefixNode]] = {}
        self._waiting: list[PrefixNode] = []  # not hashed yet

    def add(self, node: PrefixNode) -> None:
        insort(self._lengths, node.length)
        self._waiting.append(node)

    def proposals(self, prompt: Int32, start: PrefixNode | None, *, others: bool) -> Iterator[list[PrefixNode]]:
        """Candidates: contexts that may be prefixes of `prompt`, grouped by length, the longest first.

        `start` is a call whose context is a proven prefix. Then only longer contexts are proposed, and with `others`
        also those of the same length, including `start`.
        """
        base = start.length if start is not None else 0
        low = bisect_left(self._lengths, base) if others else bisect_right(self._lengths, base)
        high = bisect_right(self._lengths, len(prompt))
        if high - low <= (start is not None and others):  # no candidates except `start` itself
            return
        self._hash_waiting()
        known = start.context_hash or 0 if start is not None else 0
        hashes = prefix_hashes(prompt[base:], known, offset=base)
        lengths = np.unique(self._lengths[low:high])
        for value in reversed(hashes[lengths - base].tolist()):
            if entry := self._by_hash.get(value):
                yield entry

    def _hash_waiting(self) -> None:
        """Hashes new contexts, each from the end of its parent's context if that is hashed."""
        for node in self._waiting:
            call, parent = node.call, node.parent
            start, known = 0, 0
            if parent is not None and parent.context_hash is not None:
                start, known = parent.length, parent.context_hash
            middle = len(call.prompt_ids)
            known = int(prefix_hashes(call.prompt_ids[start:], known, offset=start)[-1])
            node.context_hash = int(prefix_hashes(call.output_ids, known, offset=middle)[-1])
            self._by_hash.setdefault(node.context_hash, []).append(node)
        self._waiting.clear()


def prefix_hashes(ids: Int32, known: int, *, offset: int) -> NDArray[np.uint64]:
    """The hashes of the prefixes that end at each of `ids`. The first id is token `offset`; `known` is the hash of the
    tokens before it.

    Multilinear hash: the sum of (id + 1) times a fixed random coefficient of the token's position, modulo 2**64.
    """
    hashes = np.empty(len(ids) + 1, np.uint64)
    hashes[0] = known
    if len(ids):
        steps, end = hashes[1:], offset + len(ids)
        np.add(ids, 1, out=steps, casting="unsafe", dtype=np.uint64)
        np.multiply(steps, _coefficients(max(12, (end - 1).bit_length()))[offset:end], out=steps)
        np.cumsum(hashes, out=hashes)
    return hashes


@lru_cache(maxsize=16)
def _coefficients(bits: int) -> NDArray[np.uint64]:
    """A table of 2**bits coefficients. A longer table begins with the shorter one."""
    return np.random.PCG64(_SEED).random_raw(1 << bits)
