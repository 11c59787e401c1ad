"""Builds segments: full-width arrays of a run of calls that extend each other.

The tokens of a run are its last call's prompt and output; every earlier call's output lies in that prompt at the
place its own prompt length says, which the forest has proven. So a segment is one concatenation and a few slices.
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
from rolltap.types import NO_VERSION, Call, CallKind, CallSpan, Segment


@dataclass(frozen=True, slots=True, eq=False)
class SpanPair:
    """A call's turn as it appears where it is trained and where it is context: one object each for all segments."""

    owned: CallSpan
    context: CallSpan


def span_pair(node: PrefixNode, index: int, reason: MaskReason, agent: str) -> SpanPair:
    start, end, call = len(node.call.prompt_ids), node.length, node.call
    context = CallSpan(call.id, start, end, trained=False, index=index, agent=agent)
    if reason is not MaskReason.TRAINED:
        return SpanPair(context, context)
    return SpanPair(CallSpan(call.id, start, end, trained=True, index=index, agent=agent), context)


def build_segment(plan: SegmentPlan, spans: Mapping[str, SpanPair], purposes: Mapping[str, Purpose]) -> Segment:
    """The arrays of a run. Extras are 0 off the mask; where a trained call lacks one, NaN (floats) or -1 (integers)."""
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
        extras=_extras(trained, length),
    )


def _extras(trained: Sequence[Call], length: int) -> dict[str, np.ndarray]:
    """The optional per-token arrays of the trained calls, laid out over the segment."""
    extras: dict[str, np.ndarray] = {}
    for name in sorted({name for call in trained for name in call.extras}):
        samples = {call.id: call.extras[name] for call in trained if name in call.extras}
        forms = {(array.dtype, array.shape[1:]) for array in samples.values()}
        if len(forms) > 1:
            raise AlignmentError(f"extra {name!r} has several forms in one segment: calls {', '.join(samples)}")
        dtype, shape = forms.pop()
        laid = np.zeros((length, *shape), dtype)
        for call in trained:
            laid[len(call.prompt_ids) : call.context_length] = samples.get(call.id, _absent(dtype))
        extras[name] = laid
    return extras


def _absent(dtype: np.dtype) -> float | int:
    """What stands for a value that the engine did not give for a trained token."""
    if dtype.kind == "f":
        return float("nan")
    return -1 if dtype.kind == "i" else 0
