"""A session's threads: the calls of one conversation, also across breaks; and which of several samples it went on with.

Token prefixes prove parents. Over a break, a call continues the call whose reply is the last one in its history
(`CallShape.follows`). If the record does not name it, a thread follows breaks whose reason means that the conversation
continues. Threads only decide the kinds of calls; they never decide which tokens follow each other in training.

Siblings are samples of the same prompt for the same request. A sibling is kept if a later call continues it: token for
token, or over a break after the reply. If a break names only the shared prompt, the sibling is kept whose reply is in
the later prompt. If no call continues any of them, the samples of the latest request are kept, all of them if it asked
for several. The other siblings are abandoned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rolltap.reconstructor.forest import PrefixNode, TokenForest
from rolltap.reconstructor.rules import unusable
from rolltap.types import Break, BreakReason, Call, Int32, Outcome

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
        depths[node.id] = node.call.shape.replies
        if earlier is not None:
            before[node.id] = earlier
            followers.setdefault(earlier.id, []).append(node)
            if earlier is node.parent or node.call.break_ is None:  # its history is that of `earlier`, and its reply
                depths[node.id] = depths.get(earlier.id, 0) + 1
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


def _root(roots: dict[str, str], call_id: str) -> str:
    """The representative of a call's thread (union-find with path compression)."""
    while roots[call_id] != call_id:
        roots[call_id] = roots[roots[call_id]]
        call_id = roots[call_id]
    return call_id


CONTINUED_IN_OTHER_TOKENS = frozenset(
    {BreakReason.THINKING_DROPPED, BreakReason.TEMPLATE_NOT_BRIDGEABLE, BreakReason.TOKENS_DIFFER}
)
"""Breaks whose call continues exactly the reply of the named call, rendered again."""

WINDOW = 4
"""Number of consecutive tokens in a prompt that count as a piece of a reply."""

REPLY_END, STANDS = 32, 0.5
"""A later prompt contains a reply if it contains half of the reply's last tokens, of which this many are compared."""


def abandoned_calls(forest: TokenForest) -> set[str]:
    """The ids of abandoned calls: their prompt was asked again, and no call continues their reply."""
    followers, named = _followers(forest)
    abandoned: set[str] = set()
    for siblings in _retries(forest):
        rivals = [node for node in siblings if unusable(node.call) is None]
        if len(rivals) < 2:
            continue
        ranks = {node.id: _rank(followers.get(node.id, ())) for node in rivals}
        if not any(ranks.values()):
            ranks.update(_ranks_by_content(rivals, [later for node in siblings for later in named.get(node.id, ())]))
        best = max(ranks.values())
        if best == 0:  # the samples of the latest request
            kept = {node.id for node in rivals[-max(1, rivals[-1].call.shape.choices) :]}
        else:
            kept = {node.id for node in rivals if ranks[node.id] == best}
        abandoned |= ranks.keys() - kept
    return abandoned


def _retries(forest: TokenForest) -> Iterator[list[PrefixNode]]:
    """Groups of calls of one agent with the same prompt and the same demands."""
    for siblings in forest.siblings():
        alike: dict[tuple[str, str], list[PrefixNode]] = {}
        for node in siblings:
            alike.setdefault((node.call.agent, node.call.shape.asked), []).append(node)
        yield from alike.values()


def _followers(forest: TokenForest) -> tuple[dict[str, list[PrefixNode]], dict[str, list[PrefixNode]]]:
    """By call id: the calls that continue its reply, and those that name it but may continue a sibling's reply."""
    followers: dict[str, list[PrefixNode]] = {}
    named: dict[str, list[PrefixNode]] = {}
    for node in forest:
        recorded = node.call.break_
        if node.parent is not None:
            followers.setdefault(node.parent.id, []).append(node)
        elif recorded is not None:
            parent_id = recorded.parent_id or node.call.parent_id
            if parent_id is not None and parent_id != node.id:
                sure = recorded.reason in CONTINUED_IN_OTHER_TOKENS
                (followers if sure else named).setdefault(parent_id, []).append(node)
    return followers, named


def _rank(followers: Sequence[PrefixNode]) -> int:
    """2 if a completed call continues, 1 if only a call without a usable reply does, else 0."""
    return max((2 if node.call.outcome is Outcome.COMPLETED else 1 for node in followers), default=0)


def _ranks_by_content(rivals: Sequence[PrefixNode], later: Sequence[PrefixNode]) -> Mapping[str, int]:
    """A rank for the sibling of which a later prompt contains the largest share."""
    ranks: dict[str, int] = {}
    for node in later:
        shares = sorted((quoted_share(node.call.prompt_ids, rival.call.output_ids), rival.id) for rival in rivals)
        if shares[-1][0] > shares[-2][0]:
            ranks[shares[-1][1]] = max(_rank([node]), ranks.get(shares[-1][1], 0))
    return ranks


def stands_in(prompt: Int32, call: Call) -> bool:
    """Whether a later prompt contains a call's reply. Only its end is compared: its thinking may have been dropped."""
    return len(call.output_ids) > 0 and quoted_share(prompt, call.output_ids[-REPLY_END:]) >= STANDS


def quoted_share(prompt: Int32, output: Int32) -> float:
    """The share of a reply's windows that a prompt contains."""
    window = min(WINDOW, len(output))
    return float(np.isin(_windows(output, window), _windows(prompt, window)).mean())


def _windows(ids: Int32, window: int) -> np.ndarray:
    """A hash of each stretch of `window` ids."""
    if len(ids) < window:
        return np.empty(0, np.uint64)
    stretches = np.lib.stride_tricks.sliding_window_view(ids, window)
    hashes = np.zeros(len(stretches), np.uint64)
    for offset in range(window):
        column = stretches[:, offset].astype(np.uint64) + np.uint64(1)
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + column
    return hashes
