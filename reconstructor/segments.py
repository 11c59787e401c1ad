"""Builds segments: full-width arrays of a chain of calls that extend each other.

The tokens of a chain are its last call's prompt and output. Each earlier call's output is in that prompt, at the index
of its own prompt length, as the forest has proven. So a segment is one concatenation and a few slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolltap.errors import AlignmentError
from rolltap.reconstructor.forest import PrefixNode
from rolltap.reconstructor.kinds import Purpose
from rolltap.reconstructor.rules import MaskReason
from rolltap.reconstructor.strategies import SegmentPlan
from rolltap.types import NO_VERSION, ROUTED_EXPERTS, Call, CallKind, CallSpan, Segment


@dataclass(frozen=True, slots=True, eq=False)
class SpanPair:
    """A call's span in two forms, trained and as context. All segments share these objects."""

    owned: CallSpan
    context: CallSpan


def span_pair(node: PrefixNode, index: int, reason: MaskReason, agent: str) -> SpanPair:
    start, end, call = len(node.call.prompt_ids), node.length, node.call
    context = CallSpan(call.id, start, end, trained=False, index=index, agent=agent)
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
        loss_mask[start:end] = True
        logprobs[start:end] = call.logprobs
        for span in call.versions:
            versions[start + span.start : start + span.end] = span.version
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
    )


def _extras(trained: Sequence[Call], path: Sequence[Call], length: int) -> dict[str, np.ndarray]:
    """The optional per-token arrays of the trained calls over the whole segment; routed experts of all calls.

    Tables [T, K] have the width of the widest one, as the number of candidates can change during a session.
    """
    extras: dict[str, np.ndarray] = {}
    for name in sorted({name for call in trained for name in call.extras}):
        samples = {call.id: call.extras[name] for call in trained if name in call.extras}
        dtype, shape = _common_form(name, samples)
        routed = name == ROUTED_EXPERTS
        laid = np.full((length, *shape), -1 if routed else 0, dtype)
        for call in path if routed else trained:
            values = call.extras.get(name) if routed else samples.get(call.id)
            laid[len(call.prompt_ids) : call.context_length] = _fitted(values, dtype, shape)
        extras[name] = laid
    return extras


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
