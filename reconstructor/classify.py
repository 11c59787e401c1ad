"""Classifies a forest's calls: their kinds, and whether they carry loss, are context, or led to nothing."""

from __future__ import annotations

from rolltap.reconstructor.forest import PrefixNode, TokenForest
from rolltap.reconstructor.kinds import purposes_of
from rolltap.reconstructor.rules import MaskReason, Rules, unusable
from rolltap.reconstructor.siblings import abandoned_calls
from rolltap.reconstructor.strategies import KeptCalls


def classify(forest: TokenForest, rules: Rules) -> KeptCalls:
    """The kept calls of a forest under `rules`."""
    abandoned = abandoned_calls(forest)
    purposes = purposes_of(forest)
    reasons = {
        node.id: rules.mask_reason(node.call, purposes.by_call[node.id].kind, abandoned=node.id in abandoned)
        for node in forest
    }
    trained: dict[str, int] = {}
    children: dict[str, tuple[PrefixNode, ...]] = {}
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
    return KeptCalls(nodes, roots, children, reasons, trained, purposes)
