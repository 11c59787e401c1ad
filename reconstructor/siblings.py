"""Samples of one prompt for one request: which of them the harness went on from.

Kept are those that a later call goes on from: token for token, or over a break behind the reply. Where a break names
only the prompt that is shared, the sibling whose reply stands in the later prompt is the one. Where nothing goes on,
the latest request's samples are kept: all of them if it asked for several. The others are abandoned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rolltap.reconstructor.forest import PrefixNode, TokenForest
from rolltap.reconstructor.rules import unusable
from rolltap.types import BreakReason, Int32, Outcome

CONTINUED_IN_OTHER_TOKENS = frozenset(
    {BreakReason.THINKING_DROPPED, BreakReason.TEMPLATE_NOT_BRIDGEABLE, BreakReason.TOKENS_DIFFER}
)
"""Breaks whose call goes on from exactly the reply of the call that they name, rendered anew."""

WINDOW = 4
"""Tokens that must stand in a prompt in the same order to count as a piece of a reply."""


def abandoned_calls(forest: TokenForest) -> set[str]:
    """The ids of calls whose prompt was asked again, and whose reply nothing went on from."""
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
    """Calls of one agent that asked the same of the same prompt."""
    for siblings in forest.siblings():
        alike: dict[tuple[str, str], list[PrefixNode]] = {}
        for node in siblings:
            alike.setdefault((node.call.agent, node.call.shape.asked), []).append(node)
        yield from alike.values()


def _followers(forest: TokenForest) -> tuple[dict[str, list[PrefixNode]], dict[str, list[PrefixNode]]]:
    """By call: the calls that went on from its reply, and those that name it but may go on from a sibling's."""
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
    """2 where a completed call went on, 1 where only a call that came to nothing did, else 0."""
    return max((2 if node.call.outcome is Outcome.COMPLETED else 1 for node in followers), default=0)


def _ranks_by_content(rivals: Sequence[PrefixNode], later: Sequence[PrefixNode]) -> Mapping[str, int]:
    """Ranks for the one sibling whose reply stands in a later prompt more than any other's."""
    ranks: dict[str, int] = {}
    for node in later:
        shares = sorted((quoted_share(node.call.prompt_ids, rival.call.output_ids), rival.id) for rival in rivals)
        if shares[-1][0] > shares[-2][0]:
            ranks[shares[-1][1]] = max(_rank([node]), ranks.get(shares[-1][1], 0))
    return ranks


def quoted_share(prompt: Int32, output: Int32) -> float:
    """The share of a reply's windows that stand in a prompt."""
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
