"""Reconstructs a session's trajectory from its recorded calls. A pure function that guarantees token fidelity.

Invariants, each with a property test in `tests/unit/reconstructor`:

* Every token with loss was sampled by the engine, follows exactly the prompt tokens that the engine saw, and has the
  log-probability and weight version with which it was sampled.
* Each trained call's sampled tokens carry loss in exactly one segment and are context in all others.
* A segment up to the end of any of its spans is exactly that call's prompt and output.
* The result depends only on the set of calls, not on their order or on repeated records.

Nothing is repaired: a call that equal tokens do not prove begins a new segment, with a `Break` that gives the reason.
Recorded breaks are measured again, and missing ones are derived. Every call that extends no earlier one has exactly one
break, except the session's first call and a retry of a call that has none. A break recorded for a call that does extend
an earlier one (the harness edited the history after it) is kept too. `token_index` is always measured on the arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rolltap.errors import ConfigError
from rolltap.reconstructor.findings import findings_of
from rolltap.reconstructor.forest import PrefixNode, TokenForest, common_prefix
from rolltap.reconstructor.kinds import purposes_of
from rolltap.reconstructor.rules import MaskReason, Rules, unusable
from rolltap.reconstructor.segments import KeptCalls, SegmentPlan, Strategy, build_segment, span_pair, strategy_named
from rolltap.reconstructor.threads import abandoned_calls
from rolltap.types import Break, BreakReason, Call, Classification, Outcome, Segment, Trajectory


def reconstruct(calls: Iterable[Call], *, strategy: str | Strategy = "tree", rules: Rules | None = None) -> Trajectory:
    """The trajectory of one session's calls.

    Calls of the session's origin (`Call.sampled_by`) are context of those that continue them. They carry no loss here,
    and are neither classified nor among the findings: all that is said of the session.

    `strategy` is a `Strategy`, or the name of one in `STRATEGIES` or of an installed entry point. `rules` default to
    `Rules()`. Raises `RecordCorrupt` if two records of a call differ or the calls belong to several sessions,
    `AlignmentError` if arrays have different lengths, `ConfigError` for an unknown strategy.
    """
    forest, origin = TokenForest(), ""
    for call in sorted(calls, key=lambda call: call.id):
        origin = call.id if call.sampled_by else origin
        if len(call.output_ids) or not call.sampled_by:  # a fork before a reply's first token: nothing to continue
            forest.add(call)
    link_strategy = strategy_named(strategy) if isinstance(strategy, str) else strategy
    return _assemble(forest, link_strategy, rules or Rules(), origin)


def _assemble(forest: TokenForest, strategy: Strategy, rules: Rules, origin: str) -> Trajectory:
    """The trajectory of a forest: classifies the calls, cuts them into plans, builds one segment per plan.

    `origin`: the call from which the session was forked.
    """
    kept = classify(forest, rules)
    purposes = kept.purposes.by_call
    breaks = breaks_of(forest, kept.purposes.compacted)
    plans = sorted(strategy.plans(kept), key=lambda plan: plan.path[plan.own].id)
    _check(plans, kept)
    indices = _turn_indices(forest, breaks)
    spans = {
        node.id: span_pair(node, indices[node.id], kept.reasons[node.id], purposes[node.id].agent)
        for node in kept.nodes
    }
    segments = tuple(build_segment(plan, spans, purposes) for plan in plans)
    classifications = tuple(
        Classification(
            node.id,
            purposes[node.id].kind,
            purposes[node.id].rule,
            purposes[node.id].agent,
            mask="" if kept.reasons[node.id] is MaskReason.TRAINED else kept.reasons[node.id].value,
        )
        for node in forest.own
    )
    found_breaks = tuple(breaks.values())
    findings = findings_of([node.call for node in forest.own], classifications, found_breaks, rules.log_check, origin)
    return Trajectory(
        session_id=forest.session_id,
        segments=segments,
        breaks=found_breaks,
        counts=_counts(forest, kept, breaks, segments, rules)
        | {f"findings.{finding.name}": 1 for finding in findings}
        | {f"log_checks.{rules.log_check.verdict}": 1},
        classifications=classifications,
        findings=findings,
        log_check=rules.log_check,
    )


def _check(plans: Sequence[SegmentPlan], kept: KeptCalls) -> None:
    """Checks that a strategy's plans fulfil its contract."""
    owners = Counter(node.id for plan in plans for node in plan.path[plan.own :])
    if owners.keys() != {node.id for node in kept.nodes} or any(count > 1 for count in owners.values()):
        wrong = sorted(node.id for node in kept.nodes if owners[node.id] != 1)
        raise ConfigError(f"a strategy must own every kept call once; wrong for {', '.join(wrong[:5])}")
    for plan in plans:
        for earlier, later in zip(plan.path, plan.path[1:], strict=False):
            if later.parent is not earlier:
                raise ConfigError(f"a strategy put call {later.id} after {earlier.id}, which it does not extend")


def _turn_indices(forest: TokenForest, breaks: Mapping[str, Break]) -> dict[str, int]:
    """Each call's turn number in its conversation, which continues over a break unless that begins a new one."""
    indices: dict[str, int] = {}
    for node in forest:
        chain: dict[str, None] = {}
        step: PrefixNode | None = node
        while step is not None and step.id not in indices and step.id not in chain:
            chain[step.id] = None
            step = step.parent or _before_break(forest, step, breaks.get(step.id))
        first = indices.get(step.id, -1) + 1 if step is not None else 0
        indices.update((call_id, first + depth) for depth, call_id in enumerate(reversed(chain)))
    return indices


def _before_break(forest: TokenForest, node: PrefixNode, before: Break | None) -> PrefixNode | None:
    if before is None or before.reason is BreakReason.NEW_CONVERSATION:
        return None
    return forest.get(before.parent_id)


def _counts(
    forest: TokenForest, kept: KeptCalls, breaks: Mapping[str, Break], segments: Sequence[Segment], rules: Rules
) -> dict[str, int]:
    """The counts for the report. `trained_tokens` is counted on the masks, `trainable_tokens` on the calls, `answers`
    are replies of the policy that its harness got (`Rules.is_answer`).

    Calls of the origin count only as masked, by `MaskReason.ORIGIN`.
    """
    own = forest.own
    counts = Counter(
        {
            "calls": len(own),
            "answers": sum(rules.is_answer(node.call, kept.purposes.by_call[node.id].kind) for node in own),
            "prompt_tokens": sum(len(node.call.prompt_ids) for node in own),
            "sampled_tokens": sum(len(node.call.output_ids) for node in own),
            "delivered_tokens": sum(len(node.call.output_ids) for node in own if unusable(node.call) is None),
            "trainable_tokens": sum(kept.trained[root.id] for root in kept.roots),
            "trained_tokens": sum(int(segment.loss_mask.sum()) for segment in segments),
            "trained_calls": sum(reason is MaskReason.TRAINED for reason in kept.reasons.values()),
            "call_row_tokens": sum(node.length for node in kept.nodes if kept.reasons[node.id] is MaskReason.TRAINED),
            "merged_calls": sum(node.parent is not None for node in own),
            "segments": len(segments),
            "rows": sum(bool(segment.loss_mask.any()) for segment in segments),
            "row_tokens": sum(len(segment) for segment in segments if segment.loss_mask.any()),
            "breaks": len(breaks),
        }
    )
    for node in forest:
        reason = kept.reasons[node.id]
        if reason is not MaskReason.TRAINED:
            counts[f"masked_calls.{reason}"] += 1
            counts[f"masked_tokens.{reason}"] += len(node.call.output_ids)
        elif node.call.masked:
            counts[f"masked_tokens.{MaskReason.RULE}"] += int((~node.call.unmasked).sum())
    counts.update(f"breaks.{break_.reason}" for break_ in breaks.values())
    counts.update(f"calls.{kept.purposes.by_call[node.id].kind}" for node in own)
    return {name: counts[name] for name in sorted(counts)}


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
        ends = reason not in (MaskReason.ABANDONED, MaskReason.ORIGIN) and unusable(node.call) is None
        if kept or ends:
            stands.add(node.id)
        own = int(node.call.unmasked.sum()) if reason is MaskReason.TRAINED else 0
        trained[node.id] = own + sum(trained[child.id] for child in kept)
        children[node.id] = kept
    nodes = tuple(node for node in forest if node.id in stands)
    roots = tuple(node for node in nodes if node.parent is None)
    return KeptCalls(nodes, roots, children, reasons, trained, purposes)


def breaks_of(forest: TokenForest, compacted: frozenset[str]) -> dict[str, Break]:
    """The breaks of a forest, by the id of the call after the break, in the order of the calls.

    `compacted`: the calls that continue after a summary; only they have the reason `COMPACTION`. A refused request has
    no break, as it is not part of a conversation.
    """
    retries = {node.id for siblings in forest.siblings() for node in siblings[1:]}
    breaks: dict[str, Break] = {}
    for node in forest.own:
        if node.call.outcome is Outcome.REFUSED:
            continue
        recorded = forest.get(node.call.break_.parent_id if node.call.break_ is not None else node.call.parent_id)
        named = recorded if recorded is not node else None
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


def _measured(recorded: Break, node: PrefixNode, named: PrefixNode | None) -> Break:
    if named is None:
        return replace(recorded, call_id=node.id, parent_id=None, token_index=0)
    return replace(recorded, call_id=node.id, token_index=common_prefix(node.call, named.call))


def _reason(node: PrefixNode, named: PrefixNode) -> BreakReason:
    """Why `node` does not extend its recorded parent, if no break is recorded."""
    if named.call.policy != node.call.policy:
        return BreakReason.POLICY_CHANGED
    if named.call.outcome is not Outcome.COMPLETED:
        return BreakReason.PARENT_UNFINISHED
    return BreakReason.TOKENS_DIFFER
