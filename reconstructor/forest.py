"""The token forest of a session's calls: a call's parent is the earlier call whose prompt and output are the longest
exact prefix of its own prompt, token for token.

`Call.parent_id` is a hint, verified like any other candidate. Of several equal contexts, a completed call wins, then
the hinted one, then the latest. The result does not depend on the order in which calls are added.

Cost: one comparison with the hinted parent; without a good hint, one hash pass over the prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

import numpy as np

from rolltap.errors import RecordCorrupt
from rolltap.reconstructor.prefix_index import PrefixIndex, PrefixNode
from rolltap.types import Call, Int32, Outcome

__all__ = ["PrefixNode", "TokenForest", "common_prefix"]

SIBLING_KEY_TOKENS = 32
"""Number of last tokens that are compared before prompts of the same length are compared completely."""


class TokenForest:
    """One session's calls with their links. `add` takes calls in any order; `nodes` is sorted by call id."""

    def __init__(self) -> None:
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
        if self.nodes and self.nodes[0].call.session_id != call.session_id:
            raise RecordCorrupt(f"call {call.id}: session {call.session_id}, not {self.nodes[0].call.session_id}")
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
                    if _same_prompt(group[0].call, node.call):
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


def common_prefix(prompt: Int32, parent: Call) -> int:
    """The number of leading ids of `prompt` that equal the parent's prompt and output."""
    shared = _first_difference(prompt, parent.prompt_ids)
    if shared < len(parent.prompt_ids):
        return shared
    return shared + _first_difference(prompt[shared:], parent.output_ids)


def _extends(call: Call, earlier: Call) -> bool:
    """Whether `call`'s prompt begins with the whole prompt and output of an earlier call of the same policy.

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
    )


def _preference(call: Call, parent: PrefixNode) -> tuple[int, bool, bool, str]:
    """Sort key of proven parents of `call`: longest, completed, hinted, latest."""
    return parent.length, parent.call.outcome is Outcome.COMPLETED, parent.id == call.parent_id, parent.id


def _first_difference(a: Int32, b: Int32) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _same_prompt(a: Call, b: Call) -> bool:
    return a.policy == b.policy and np.array_equal(a.prompt_ids, b.prompt_ids)


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
