"""Decides whether a trainer can compute the log-probs of a call, from the sampling parameters sent to its engine.

A trainer computes log-probs at the segment's temperature, over the whole vocabulary or over the ids of the sampling
mask. The recorded log-probs must come from the same distribution. Otherwise every ratio is wrong, without any other
sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rolltap.types import SamplingFlaw

CUTS: Mapping[str, tuple[Any, ...]] = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
"""Parameters that truncate the vocabulary, with the values that do not."""

PENALTIES: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""Parameters that change the probability of tokens in the context, with the values that do not."""

SAMPLING_MASK = "sampling_mask"
"""The extra array with the ids that each token was drawn from, if the vocabulary was truncated."""


def sampling_flaw(
    sent: Mapping[str, Any], logprobs_mode: str, extras: Mapping[str, np.ndarray] | None = None
) -> SamplingFlaw | None:
    """Why a trainer cannot compute the log-probs of a call that was sampled as `sent`; None if it can.

    `extras` are the call's optional arrays.
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
    """The extra array `temperature`, if the call was sampled at a temperature other than 1."""
    temperature = temperature_of(sent)
    return {} if temperature == 1.0 or not tokens else {"temperature": np.full(tokens, temperature, np.float32)}


def temperature_of(sent: Mapping[str, Any]) -> float:
    """The sampling temperature; 1 if none was sent."""
    value = sent.get("temperature")
    return float(value) if isinstance(value, int | float) else 1.0
