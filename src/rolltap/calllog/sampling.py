"""What the sampling of a recorded call means for training on it, from what its engine was sent.

A trainer computes log-probs at the temperature that the segment carries, over the whole vocabulary or over the ids of
its sampling mask. The recorded ones must be of the same distribution: else every ratio is wrong, and nothing else would
show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rolltap.types import SamplingFlaw

CUTS: Mapping[str, tuple[Any, ...]] = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
"""Parameters that leave a part of the vocabulary to draw from, with the values that leave all of it."""

PENALTIES: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Parameters that change the likelihood of what stands in the context, with the values that change nothing."""

SAMPLING_MASK = "sampling_mask"
"""The extra array with the ids that each token was drawn from, where a part of the vocabulary was left."""


def sampling_flaw(
    sent: Mapping[str, Any], logprobs_mode: str, extras: Mapping[str, np.ndarray] | None = None
) -> SamplingFlaw | None:
    """Why a trainer can't compute the log-probs of a call that was sampled as `sent`, if it can't.

    `extras` are what the engine recorded beside its tokens.
    """
    temperature = temperature_of(sent)
    replayed = logprobs_mode == "processed" and SAMPLING_MASK in (extras or {})
    if temperature <= 0 or _differs(sent, PENALTIES) or (_differs(sent, CUTS) and not replayed):
        return SamplingFlaw.TRUNCATED
    if temperature != 1.0 and logprobs_mode != "processed":
        return SamplingFlaw.UNTEMPERED
    return None


def _differs(sent: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    return any(sent.get(name) is not None and sent[name] not in values for name, values in neutral.items())


def tempered(sent: Mapping[str, Any], tokens: int) -> dict[str, np.ndarray]:
    """The extra array `temperature`, for a call that was sampled at another one than 1."""
    temperature = temperature_of(sent)
    return {} if temperature == 1.0 or not tokens else {"temperature": np.full(tokens, temperature, np.float32)}


def temperature_of(sent: Mapping[str, Any]) -> float:
    """1 where none was sent."""
    value = sent.get("temperature")
    return float(value) if isinstance(value, int | float) else 1.0
