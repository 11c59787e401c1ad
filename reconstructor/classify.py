"""Judges a forest's calls: which carry loss, which are context, which came to nothing.

Retries: of calls that saw the same prompt, those that the harness went on from are kept; where it went on from none,
the latest is. The others are abandoned. Going on means that a later call extends the call token for token, or that a
recorded break names it as the turn that was continued in other tokens.
"""

from __future__ import annotations

from rolltap.reconstructor.forest import Node, TokenForest
from rolltap.reconstructor.rules import MaskReason, Rules, unusable
from rolltap.reconstructor.strategies import KeptCalls
from rolltap.types import BreakReason, Outcome

CONTINUED_IN_OTHER_TOKENS = frozenset(
    {BreakReason.THINKING_DROPPED, BreakReason.TEMPLATE_NOT_BRIDGEABLE, BreakReason.TOKENS_DIFFER}
)
"""Breaks whose call goes on from its parent's reply, rendered anew."""


def classify(forest: TokenForest, rules: Rules) -> KeptCalls:
    """The kept calls of a forest under `rules`."""
    abandoned = _abandoned(forest)
    reasons = {node.id: rules.mask_reason(node.call, abandoned=node.id in abandoned) for node in forest}
    trained: dict[str, int] = {}
    children: dict[str, tuple[Node, ...]] = {}
    stands: set[str] = set()
    for node in sorted(forest, key=lambda node: len(node.call.prompt_ids), reverse=True):  # children before parents
        reason = reasons[node.id]
        kept = tuple(child for child in node.children if child.id in stands)
        if kept or (reason is not MaskReason.ABANDONED and unusable(node.call) is None):
            stands.add(node.id)
        own = len(node.call.output_ids) if reason is MaskReason.TRAINED else 0
        trained[node.id] = own + sum(trained[child.id] for child in kept)
        children[node.id] = kept
    nodes = tuple(node for node in forest if node.id in stands)
    roots = tuple(node for node in nodes if node.parent is None)
    return KeptCalls(nodes, roots, children, reasons, trained)


def _abandoned(forest: TokenForest) -> set[str]:
    """The ids of calls whose prompt was asked again, and whose reply nothing went on from."""
    followers = _followers(forest)
    abandoned: set[str] = set()
    for siblings in forest.siblings():
        rivals = [node for node in siblings if unusable(node.call) is None]
        if len(rivals) < 2:
            continue
        ranks = {node.id: _rank(followers.get(node.id, ())) for node in rivals}
        best = max(ranks.values())
        kept = {rivals[-1].id} if best == 0 else {node.id for node in rivals if ranks[node.id] == best}
        abandoned |= ranks.keys() - kept
    return abandoned


def _followers(forest: TokenForest) -> dict[str, list[Node]]:
    """By call, the calls that went on from its reply."""
    followers: dict[str, list[Node]] = {}
    for node in forest:
        if node.parent is not None:
            followers.setdefault(node.parent.id, []).append(node)
        elif node.call.break_ is not None and node.call.break_.reason in CONTINUED_IN_OTHER_TOKENS:
            named = node.call.break_.parent_id or node.call.parent_id
            if named is not None and named != node.id:
                followers.setdefault(named, []).append(node)
    return followers


def _rank(followers: list[Node] | tuple[()]) -> int:
    """2 where a completed call went on, 1 where only a call that came to nothing did, else 0."""
    return max((2 if node.call.outcome is Outcome.COMPLETED else 1 for node in followers), default=0)
