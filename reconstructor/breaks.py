"""Breaks: the reasons why a call begins a segment instead of extending one.

Recorded breaks are measured again, and missing ones are derived. Every call that extends no earlier one has exactly one
break, except the session's first call and a retry of a call that has none. A break recorded for a call that does extend
an earlier one (the harness edited the history after it) is kept too. `token_index` is always measured on the arrays.
"""

from __future__ import annotations

from dataclasses import replace

from rolltap.reconstructor.forest import PrefixNode, TokenForest, common_prefix
from rolltap.types import Break, BreakReason, Outcome


def breaks_of(forest: TokenForest, compacted: frozenset[str]) -> dict[str, Break]:
    """The breaks of a forest, by the id of the call after the break, in the order of the calls.

    `compacted`: the calls that continue after a summary; only they have the reason `COMPACTION`. A refused request has
    no break, as it is not part of a conversation.
    """
    retries = {node.id for siblings in forest.siblings() for node in siblings[1:]}
    breaks: dict[str, Break] = {}
    for node in forest:
        named = _named_parent(forest, node)
        if node.call.outcome is Outcome.REFUSED:
            continue
        if node.call.break_ is not None:
            breaks[node.id] = _measured(node.call.break_, node, named)
        elif node.parent is None and named is not None:
            breaks[node.id] = _measured(Break(_reason(node, named), node.id, named.id, 0), node, named)
        elif node.parent is None and node is not forest.nodes[0] and node.id not in retries:
            breaks[node.id] = Break(BreakReason.NEW_CONVERSATION, node.id, None, 0)
        if node.id in breaks:
            breaks[node.id] = replace(breaks[node.id], reason=_proven_reason(breaks[node.id], node.id in compacted))
    return breaks


def _proven_reason(recorded: Break, compacted: bool) -> BreakReason:
    """The recorded reason, corrected by the whole session: a prompt that quotes a reply may not be a compaction."""
    if compacted:
        return BreakReason.COMPACTION
    if recorded.reason is not BreakReason.COMPACTION:
        return recorded.reason
    return BreakReason.NEW_CONVERSATION if recorded.parent_id is None else BreakReason.HISTORY_EDITED


def _named_parent(forest: TokenForest, node: PrefixNode) -> PrefixNode | None:
    """The recorded parent of this call."""
    call = node.call
    named = forest.get(call.break_.parent_id if call.break_ is not None else call.parent_id)
    return named if named is not node else None


def _measured(recorded: Break, node: PrefixNode, named: PrefixNode | None) -> Break:
    if named is None:
        return replace(recorded, call_id=node.id, parent_id=None, token_index=0)
    return replace(recorded, call_id=node.id, token_index=common_prefix(node.call.prompt_ids, named.call))


def _reason(node: PrefixNode, named: PrefixNode) -> BreakReason:
    """Why `node` does not extend its recorded parent, if no break is recorded."""
    if named.call.policy != node.call.policy:
        return BreakReason.POLICY_CHANGED
    if named.call.outcome is not Outcome.COMPLETED:
        return BreakReason.PARENT_UNFINISHED
    return BreakReason.TOKENS_DIFFER
