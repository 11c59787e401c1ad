"""What a step computed of its tokens, as annotations of the calls that sampled them.

Taken in the step's first update, where the weights are still those of the step's version: with several minibatches only
the first one's calls have annotations. A token that is not trained has no value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rolltap.contract.trainer import CallAnnotation
from rolltap.trainer_client.learner import Readout
from rolltap.trainer_client.packing import Pack
from rolltap.types import Float32

CLIPPED = "clipped"
"""The name under which a readout says where the clip cut the gradient."""

DIGITS = 5
STREAMS = ("logprobs", "entropy", CLIPPED)


def call_annotations(packs: Sequence[Pack], readouts: Sequence[Readout]) -> list[CallAnnotation]:
    """One for each call with trained tokens in the packs; a readout's arrays are over its pack's trained tokens."""
    streams: dict[str, dict[str, Float32]] = {}
    for pack, readout in zip(packs, readouts, strict=True):
        start = 0
        for row in pack.rows:
            mask = row.segment.loss_mask
            end = start + int(mask.sum())
            for name, values in zip(STREAMS, (readout.logprobs, readout.entropy, readout.values[CLIPPED]), strict=True):
                spread = np.full(len(mask), np.nan, np.float32)
                spread[mask] = values[start:end]
                for turn in row.segment.turns:
                    own = spread[turn.start : turn.end]
                    if mask[turn.start : turn.end].any():
                        stream = streams.setdefault(turn.call_id, {}).setdefault(name, np.full_like(own, np.nan))
                        np.copyto(stream, own, where=~np.isnan(own))
            start = end
    return [
        CallAnnotation(
            call_id,
            logprobs=_numbers(np.minimum(of["logprobs"], 0)),
            entropy=_numbers(np.maximum(of["entropy"], 0)),
            clipped=[None if value is None else bool(value) for value in _numbers(of[CLIPPED])],
        )
        for call_id, of in streams.items()
    ]


def _numbers(values: Float32) -> list[float | None]:
    return [None if value != value else round(value, DIGITS) for value in values.tolist()]
