"""What the sampling of a recorded call means for training on it, from what its engine was sent.

A trainer computes log-probs over the whole vocabulary, at the temperature that the segment carries. The recorded ones
must be of the same distribution: else every ratio is wrong, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rolltap.types import SamplingFlaw

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
"""The values of each parameter that leave the model's distribution as it is."""


def sampling_flaw(sent: Mapping[str, Any], logprobs_mode: str) -> SamplingFlaw | None:
    """Why a trainer can't compute the log-probs of a call that was sampled as `sent`, if it can't."""
    temperature = temperature_of(sent)
    given = {name: value for name in NEUTRAL if (value := sent.get(name)) is not None}
    if temperature <= 0 or any(value not in NEUTRAL[name] for name, value in given.items()):
        return SamplingFlaw.TRUNCATED
    if temperature != 1.0 and logprobs_mode != "processed":
        return SamplingFlaw.UNTEMPERED
    return None


def tempered(sent: Mapping[str, Any], tokens: int) -> dict[str, np.ndarray]:
    """The extra array `temperature`, for a call that was sampled at another one than 1."""
    temperature = temperature_of(sent)
    return {} if temperature == 1.0 or not tokens else {"temperature": np.full(tokens, temperature, np.float32)}


def temperature_of(sent: Mapping[str, Any]) -> float:
    """1 where none was sent."""
    value = sent.get("temperature")
    return float(value) if isinstance(value, int | float) else 1.0
