"""Siblings are samples of the same prompt for the same request. Decides which of them the harness continued.

A sibling is kept if a later call continues it: token for token, or over a break after the reply. If a break names only
the shared prompt, the sibling is kept whose reply is in the later prompt. If no call continues any of them, the samples
of the latest request are kept, all of them if it asked for several. The other siblings are abandoned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rolltap.reconstructor.forest import PrefixNode, TokenForest
from rolltap.reconstructor.rules import unusable
from rolltap.types import BreakReason, Call, Int32, Outcome

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
        kept = _latest(rivals) if best == 0 else {node.id for node in rivals if ranks[node.id] == best}
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


def _latest(rivals: Sequence[PrefixNode]) -> set[str]:
    """The samples of the latest request."""
    return {node.id for node in rivals[-max(1, rivals[-1].call.shape.choices) :]}
