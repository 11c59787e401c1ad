"""Segments: how a forest is cut into chains of calls that extend each other, and the full-width arrays of a chain.

A strategy yields `SegmentPlan`s. The calls from `own` on may carry loss in the segment; the others are context.
`reconstruct` checks that exactly one plan owns each kept call.

The tokens of a chain are its last call's prompt and output. Each earlier call's output is in that prompt, at the index
of its own prompt length, as the forest has proven. So a segment is one concatenation and a few slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rolltap.errors import AlignmentError, ConfigError
from rolltap.extras import lookup
from rolltap.reconstructor.forest import PrefixNode
from rolltap.reconstructor.kinds import Purpose, Purposes
from rolltap.reconstructor.rules import MaskReason
from rolltap.token_masks import MASK_ROWS, MASK_TABLE, joined
from rolltap.types import NO_VERSION, ROUTED_EXPERTS, Call, CallKind, CallSpan, Segment


@dataclass(frozen=True, slots=True, eq=False)
class SpanPair:
    """A call's span in two forms, trained and as context. All segments share these objects."""

    owned: CallSpan
    context: CallSpan


def span_pair(node: PrefixNode, index: int, reason: MaskReason, agent: str) -> SpanPair:
    start, end, call = len(node.call.prompt_ids), node.length, node.call
    context = CallSpan(call.id, start, end, trained=False, index=index, agent=agent, sampled_by=call.sampled_by)
    if reason is not MaskReason.TRAINED:
        return SpanPair(context, context)
    return SpanPair(CallSpan(call.id, start, end, trained=True, index=index, agent=agent), context)


def build_segment(plan: SegmentPlan, spans: Mapping[str, SpanPair], purposes: Mapping[str, Purpose]) -> Segment:
    """Builds a plan's segment. Extras are 0 outside the mask; for a trained call without one, NaN (floats) or -1.

    Routed experts are set for every sampled token, context included, and -1 elsewhere, as 0 is an expert.
    """
    last = plan.path[-1].call
    token_ids = np.concatenate([last.prompt_ids, last.output_ids]).astype(np.int32, copy=False)
    length = len(token_ids)
    loss_mask = np.zeros(length, np.bool_)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, NO_VERSION, np.int32)
    own = plan.path[plan.own :]
    trained = [node.call for node in own if spans[node.id].owned.trained]
    for call in trained:
        start, end = len(call.prompt_ids), call.context_length
        loss_mask[start:end] = call.unmasked
        logprobs[start:end] = np.where(call.unmasked, call.logprobs, np.float32(0))
        for span in call.versions:
            versions[start + span.start : start + span.end] = span.version
        versions[start:end][~call.unmasked] = NO_VERSION
    own_purposes = [purposes[node.id] for node in own]
    purpose = next((each for each in own_purposes if each.kind is CallKind.MAIN), own_purposes[0])
    context = tuple(spans[node.id].context for node in plan.path[: plan.own])
    return Segment(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        turns=context + tuple(spans[node.id].owned for node in own),
        agent=purpose.agent,
        kind=purpose.kind,
        extras=_extras(trained, [node.call for node in plan.path], length),
        images=last.images,
    )


def _extras(trained: Sequence[Call], path: Sequence[Call], length: int) -> dict[str, np.ndarray]:
    """The optional per-token arrays of the trained calls over the whole segment; routed experts of all calls.

    Tables [T, K] have the width of the widest one, as the number of candidates can change during a session.
    """
    extras: dict[str, np.ndarray] = {}
    rows_of, table = _mask_rows(trained)
    if rows_of:
        extras[MASK_TABLE] = table
    for name in sorted({name for call in trained for name in call.extras} - {MASK_TABLE}):
        samples = {call.id: call.extras[name] for call in trained if name in call.extras}
        if name == MASK_ROWS:
            samples = rows_of
        dtype, shape = _common_form(name, samples)
        routed = name == ROUTED_EXPERTS
        laid = np.full((length, *shape), -1 if routed else 0, dtype)
        for call in path if routed else trained:
            values = call.extras.get(name) if routed else samples.get(call.id)
            laid[len(call.prompt_ids) : call.context_length] = _fitted(values, dtype, shape)
            if not routed:
                laid[len(call.prompt_ids) : call.context_length][~call.unmasked] = 0
        extras[name] = laid
    return extras


def _mask_rows(calls: Sequence[Call]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The `mask_rows` of each call that has some, over one table for all of them."""
    masked = [call for call in calls if MASK_ROWS in call.extras]
    rows, table = joined([(call.extras[MASK_ROWS], call.extras[MASK_TABLE]) for call in masked])
    ends = np.cumsum([len(call.output_ids) for call in masked])
    return {call.id: part for call, part in zip(masked, np.split(rows, ends), strict=False)}, table


def _common_form(name: str, samples: Mapping[str, np.ndarray]) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and shape of one token's values.

    Raises `AlignmentError` if calls differ in more than a table's width.
    """
    forms = {(array.dtype, array.shape[1:]) for array in samples.values()}
    if len(forms) > 1 and not (len({dtype for dtype, _ in forms}) == 1 and all(len(sizes) == 1 for _, sizes in forms)):
        raise AlignmentError(f"extra {name!r} has several dtypes or shapes in one segment: calls {', '.join(samples)}")
    return max(forms, key=lambda form: form[1])


def _fitted(values: np.ndarray | None, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | float | int:
    """A call's `values`, padded to a table's width with absent values; only absent values if the call has none."""
    if values is not None and values.shape[1:] == shape:
        return values
    if values is None or values.ndim != 2 or len(shape) != 1:
        return _absent(dtype)
    return np.pad(values, ((0, 0), (0, shape[0])), constant_values=_absent(dtype))[:, : shape[0]]


def _absent(dtype: np.dtype) -> float | int:
    """The value for a trained token without a value from the engine."""
    if dtype.kind == "f":
        return float("nan")
    return -1 if dtype.kind == "i" else 0


@dataclass(frozen=True, slots=True, eq=False)
class KeptCalls:
    """The calls that appear in segments: those that the harness continued, or may still continue.

    `roots` and `children` are the forest without calls that have no usable reply. `trained` is the number of sampled
    tokens with loss in a node's whole subtree.
    """

    nodes: tuple[PrefixNode, ...]
    roots: tuple[PrefixNode, ...]
    children: Mapping[str, tuple[PrefixNode, ...]]
    reasons: Mapping[str, MaskReason]
    trained: Mapping[str, int]
    purposes: Purposes


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """A chain of calls, each extending the previous one. The calls `path[own:]` carry their loss here."""

    path: tuple[PrefixNode, ...]
    own: int


class Strategy(Protocol):
    """Cuts a forest into segment plans."""

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        """Plans that together own every kept call exactly once."""
        ...


class PerCall:
    """One segment per call, without merging."""

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for node in kept.nodes:
            yield SegmentPlan((node,), 0)


class Prefix:
    """Linear merging: a call joins the segment whose last call it extends, or else begins a new one.

    If several calls extend the same one, the first that leads to trained tokens joins.
    """

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for chain in _chains(kept, lambda node, children: _first(kept, node, children)):
            yield SegmentPlan(tuple(chain), 0)


class Tree:
    """Root-to-leaf segments. A trunk shared by branches is trained in the branch with the most trained tokens.

    A segment ends with its last trained call. Untrained calls after it (a summary, a side call) form their own segment
    without loss, for reading.
    """

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for chain in _chains(kept, lambda node, children: _heaviest(kept, node, children)):
            path = chain[0].path()
            yield SegmentPlan((*path, *chain[1:]), len(path) - 1)


STRATEGIES: Mapping[str, type[Strategy]] = {"per_call": PerCall, "prefix": Prefix, "tree": Tree}

ENTRY_POINTS = "rolltap.strategies"


def strategy_named(name: str) -> Strategy:
    """The strategy with this name, built in or from an installed package. An error lists the known names."""
    return lookup("strategy", name, STRATEGIES, ENTRY_POINTS, ConfigError)()


class _Follow(Protocol):
    def __call__(self, node: PrefixNode, children: tuple[PrefixNode, ...]) -> PrefixNode | None: ...


def _chains(kept: KeptCalls, follow: _Follow) -> Iterable[list[PrefixNode]]:
    """Covers the kept calls by disjoint downward chains. `follow` chooses the child that continues a chain."""
    tops = list(reversed(kept.roots))
    while tops:
        chain = [tops.pop()]
        while children := kept.children[chain[-1].id]:
            heir = follow(chain[-1], children)
            tops += [child for child in reversed(children) if child is not heir]
            if heir is None:
                break
            chain.append(heir)
        yield chain


def _first(kept: KeptCalls, node: PrefixNode, children: tuple[PrefixNode, ...]) -> PrefixNode | None:
    """The first child that leads to trained tokens; if none does, the first child."""
    if not kept.trained[node.id]:
        return children[0]
    return next((child for child in children if kept.trained[child.id]), None)


def _heaviest(kept: KeptCalls, node: PrefixNode, children: tuple[PrefixNode, ...]) -> PrefixNode | None:
    """The child whose subtree has the most trained tokens, of the same agent first; None if no subtree has any."""
    trained, agents = kept.trained, kept.purposes.by_call

    def weight(child: PrefixNode) -> tuple[bool, bool, int]:
        return trained[child.id] > 0, agents[child.id].agent == agents[node.id].agent, trained[child.id]

    heir = max(children, key=weight)
    return None if trained[node.id] and not trained[heir.id] else heir
