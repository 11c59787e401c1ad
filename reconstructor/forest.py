"""The token forest of a session's calls: a call's parent is the earlier call whose prompt and output are the longest
exact prefix of its own prompt, token for token.

`Call.parent_id` is a hint, verified like any other candidate. Of several equal contexts, a completed call wins, then
the hinted one, then the latest. The result does not depend on the order in which calls are added.

Cost: one comparison with the hinted parent; without a good hint, one hash pass over the prompt. Hashes of all its
prefixes are looked up at the lengths of recorded contexts (a call's prompt and output), the longest first. A hash only
proposes: tokens are compared, so that a collision costs time and never correctness. Hashes are made when they are first
needed: a session whose calls name their parents needs none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rolltap.errors import RecordCorrupt
from rolltap.types import Call, Int32, Outcome, common_length, images_differ_at

__all__ = ["PrefixNode", "TokenForest", "common_prefix"]

SIBLING_KEY_TOKENS = 32
"""Number of last tokens that are compared before prompts of the same length are compared completely."""


class TokenForest:
    """One session's calls with their links, and those of its origin. `add` takes calls in any order; `nodes` is sorted
    by call id. `session_id` is the session's; empty as long as it has no call of its own.
    """

    def __init__(self) -> None:
        self.session_id = ""
        self.nodes: list[PrefixNode] = []
        self._by_id: dict[str, PrefixNode] = {}
        self._contexts = PrefixIndex()
        self._prompts: dict[tuple[int, bytes], list[PrefixNode]] = {}  # by length and end, each sorted by id
        self._latest: dict[str, PrefixNode] = {}  # by agent: the most likely parent of a call without a hint
        self._hinting: dict[str, list[PrefixNode]] = {}  # by call id: the calls with this `parent_id`

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self.nodes)

    def get(self, call_id: str | None) -> PrefixNode | None:
        return self._by_id.get(call_id) if call_id is not None else None

    @property
    def own(self) -> list[PrefixNode]:
        """The session's own calls: those that are not of its origin."""
        return [node for node in self.nodes if not node.call.sampled_by]

    def position(self, call_id: str) -> int:
        """The place of a call in `nodes`."""
        return bisect_left(self.nodes, call_id, key=_by_call_id)

    def add(self, call: Call) -> None:
        """Adds a call. Adding the same call again has no effect, except that its delivery may be known now.

        Raises `RecordCorrupt` for a different call with a known id, or a call of another session.
        """
        known = self._by_id.get(call.id)
        if known is not None:
            known.call = _merged(known.call, call)
            return
        if not call.sampled_by:
            if self.session_id and self.session_id != call.session_id:
                raise RecordCorrupt(f"call {call.id}: session {call.session_id}, not {self.session_id}")
            self.session_id = call.session_id
        node = PrefixNode(call)
        self._link(node, self._find(call))
        position = bisect_left(self.nodes, node.id, key=_by_call_id)
        self.nodes.insert(position, node)
        self._by_id[node.id] = node
        if call.parent_id is not None:
            self._hinting.setdefault(call.parent_id, []).append(node)
        alike = len(call.prompt_ids), call.prompt_ids[-SIBLING_KEY_TOKENS:].tobytes()
        insort(self._prompts.setdefault(alike, []), node, key=_by_call_id)
        if len(call.output_ids):
            self._contexts.add(node)
            latest = self._latest.get(call.agent)
            if latest is None or latest.id < node.id:
                self._latest[call.agent] = node
            for later in (*self._hinting.get(node.id, ()), *self.nodes[position + 1 :]):
                if _extends(later.call, node.call) and (
                    later.parent is None or _preference(later.call, node) > _preference(later.call, later.parent)
                ):
                    self._link(later, node)

    def siblings(self) -> Iterator[list[PrefixNode]]:
        """The groups of calls with the same policy and prompt, each sorted by id."""
        for nodes in self._prompts.values():
            groups: list[list[PrefixNode]] = []
            for node in nodes:
                for group in groups:
                    first, call = group[0].call, node.call
                    is_alike = first.policy == call.policy and first.images == call.images
                    if is_alike and np.array_equal(first.prompt_ids, call.prompt_ids):
                        group.append(node)
                        break
                else:
                    groups.append([node])
            yield from groups

    def _link(self, node: PrefixNode, parent: PrefixNode | None) -> None:
        if node.parent is not None:
            node.parent.children.remove(node)
        node.parent = parent
        if parent is not None:
            insort(parent.children, node, key=_by_call_id)

    def _find(self, call: Call) -> PrefixNode | None:
        """The parent of a new call: the proven one with the longest context."""
        start = self._start(call)
        certain = start is not None and start.id == call.parent_id and start.call.outcome is Outcome.COMPLETED
        for candidates in self._contexts.proposals(call.prompt_ids, start, others=not certain):
            proven = [candidate for candidate in candidates if _extends(call, candidate.call)]
            if proven:
                return max(proven, key=lambda candidate: _preference(call, candidate))
        return start

    def _start(self, call: Call) -> PrefixNode | None:
        """A proven ancestor to start the search from: the hinted parent, or else the agent's latest call."""
        for guess in (self.get(call.parent_id), self._latest.get(call.agent)):
            if guess is not None and len(guess.call.output_ids) and _extends(call, guess.call):
                return guess
        return None


def common_prefix(call: Call, parent: Call) -> int:
    """The number of leading ids of `call`'s prompt that are the parent's prompt and output, up to a different image."""
    shared = common_length(call.prompt_ids, parent.prompt_ids)
    if shared == len(parent.prompt_ids):
        shared += common_length(call.prompt_ids[shared:], parent.output_ids)
    return min(shared, images_differ_at(call.images, parent.images))


def _extends(call: Call, earlier: Call) -> bool:
    """Whether `call`'s prompt begins with the whole prompt, images included, and output of an earlier call of the same
    policy.

    Ids give the order, but the clocks of two proxies differ, so a recorded parent may have a later id. A parent's
    output is not empty, so its prompt is always shorter, and links cannot form a cycle.
    """
    middle, end = len(earlier.prompt_ids), earlier.context_length
    return (
        (earlier.id < call.id or earlier.id == call.parent_id)
        and earlier.policy == call.policy
        and end <= len(call.prompt_ids)
        and np.array_equal(call.prompt_ids[middle:end], earlier.output_ids)
        and np.array_equal(call.prompt_ids[:middle], earlier.prompt_ids)
        and images_differ_at(call.images, earlier.images) >= end
    )


def _preference(call: Call, parent: PrefixNode) -> tuple[int, bool, bool, str]:
    """Sort key of proven parents of `call`: longest, completed, hinted, latest."""
    return parent.length, parent.call.outcome is Outcome.COMPLETED, parent.id == call.parent_id, parent.id


def _by_call_id(node: PrefixNode) -> str:
    return node.call.id


def _merged(a: Call, b: Call) -> Call:
    """Merges two records of the same call."""
    for item in fields(Call):
        mine, theirs = getattr(a, item.name), getattr(b, item.name)
        if item.name != "delivered" and not _equal(mine, theirs):
            raise RecordCorrupt(f"call {a.id} is recorded twice with different {item.name}")
    better = a.delivered is None or b.delivered is True
    return replace(a, delivered=b.delivered) if better else a


def _equal(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return a == b


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
