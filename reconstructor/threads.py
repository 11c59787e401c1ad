"""A session's threads: the calls of one conversation, also across breaks.

Token prefixes prove parents. Over a break, a call continues the call whose reply is the last one in its history
(`CallShape.follows`). If the record does not name it, a thread follows breaks whose reason means that the conversation
continues. Threads only decide the kinds of calls; they never decide which tokens follow each other in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolltap.reconstructor.forest import PrefixNode, TokenForest
from rolltap.reconstructor.siblings import stands_in
from rolltap.types import Break, BreakReason

FRESH_STARTS = frozenset({BreakReason.NEW_CONVERSATION, BreakReason.COMPACTION})
"""Breaks after which a conversation does not continue, unless the request has as much history as its parent's."""


@dataclass(slots=True, eq=False)
class Thread:
    """The calls of one conversation, sorted by id.

    `systems`: the digests of the system texts that its calls began with, by the digest of the tools that they offered
    ("" for none).
    """

    calls: list[PrefixNode] = field(default_factory=list)
    systems: dict[str, set[str]] = field(default_factory=dict)

    def append(self, node: PrefixNode) -> None:
        self.calls.append(node)
        shape = node.call.shape
        self.systems.setdefault(shape.toolset if shape.tools else "", set()).add(shape.system)

    @property
    def first(self) -> PrefixNode:
        return self.calls[0]

    @property
    def toolsets(self) -> set[str]:
        """Digests of the tool lists that its calls offered."""
        return self.systems.keys() - {""}

    def has_frame_of(self, node: PrefixNode) -> bool:
        """Whether some of its calls offered the same tools after the same system text as `node`.

        If the system text changed within the thread (it has a clock), the tools alone decide.
        """
        shape = node.call.shape
        systems = self.systems.get(shape.toolset if shape.tools else "", set())
        return shape.system in systems or len(systems) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Threads:
    """The threads of a session in the order of their first calls, and the links between calls.

    `depths`: the number of replies in each call's history. `before`: the call that each call continues. `followers`:
    the reverse of `before`.
    """

    threads: list[Thread]
    by_call: Mapping[str, Thread]
    depths: Mapping[str, int]
    before: Mapping[str, PrefixNode]
    followers: Mapping[str, list[PrefixNode]]


def threads_of(forest: TokenForest) -> Threads:
    """Links every call with the one that it continues, in tokens or over a break."""
    depths: dict[str, int] = {}
    before: dict[str, PrefixNode] = {}
    followers: dict[str, list[PrefixNode]] = {}
    roots: dict[str, str] = {}
    for node in forest:
        earlier = _earlier(forest, node, depths)
        roots[node.id] = node.id
        depths[node.id] = _depth(node, earlier, depths)
        if earlier is not None:
            before[node.id] = earlier
            followers.setdefault(earlier.id, []).append(node)
    for call_id, earlier in before.items():
        low, high = sorted((_root(roots, call_id), _root(roots, earlier.id)))
        roots[high] = low
    by_root: dict[str, Thread] = {}
    by_call = {node.id: by_root.setdefault(_root(roots, node.id), Thread()) for node in forest}
    for node in forest:
        by_call[node.id].append(node)
    return Threads(list(by_root.values()), by_call, depths, before, followers)


def _earlier(forest: TokenForest, node: PrefixNode, depths: Mapping[str, int]) -> PrefixNode | None:
    """The call that `node` continues, if any."""
    shape, recorded = node.call.shape, node.call.break_
    followed = forest.get(shape.follows or None)
    if followed is not None and followed.id < node.id and not _is_given_as_reply(followed, node):
        return followed
    if followed is not None or node.parent is not None:
        return node.parent
    named = forest.get(recorded.parent_id if recorded is not None else node.call.parent_id)
    if named is None or named is node:
        return None
    return named if recorded is None or _goes_on(recorded, node, named, depths.get(named.id, 0)) else None


def _is_given_as_reply(followed: PrefixNode, node: PrefixNode) -> bool:
    """Whether a side call's reply stands in the agent's history as the agent's own: a summary, or a plan.

    It was sampled without tools, and the agent's history is not the one that the side call got.
    """
    mine, theirs, recorded = node.call.shape, followed.call.shape, node.call.break_
    if not mine.tools or theirs.tools != 0:
        return False
    is_other_history = not theirs.replies and recorded is not None and recorded.parent_id != followed.id
    return followed.id in mine.quotes or (followed.parent is None and is_other_history)


def _goes_on(recorded: Break, node: PrefixNode, named: PrefixNode, depth: int) -> bool:
    """Whether a conversation continues over a break from `named`, whose history has `depth` replies.

    A request without replies continues no call. Nor does a request continue a call without tools whose reply it lacks,
    or one with no fewer replies in its history if it offers tools itself: a router call gets the agent's history, and
    the agent's own calls then continue.
    """
    shape = node.call.shape
    if shape.tools is not None and not shape.replies:
        return False
    if named.call.shape.tools == 0 and shape.tools and shape.replies <= depth:
        return False
    if named.call.shape.tools == 0 and named.call.shape.ends and not stands_in(node.call.prompt_ids, named.call):
        return False
    return recorded.reason not in FRESH_STARTS or 0 < shape.replies >= depth


def _depth(node: PrefixNode, earlier: PrefixNode | None, depths: Mapping[str, int]) -> int:
    """The number of replies in the call's history: the recorded one, or one more than the parent's if it extends it."""
    if earlier is None or (earlier is not node.parent and node.call.break_ is not None):
        return node.call.shape.replies
    return depths.get(earlier.id, 0) + 1


def _root(roots: dict[str, str], call_id: str) -> str:
    """The representative of a call's thread (union-find with path compression)."""
    while roots[call_id] != call_id:
        roots[call_id] = roots[roots[call_id]]
        call_id = roots[call_id]
    return call_id
