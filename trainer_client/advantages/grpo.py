"""GRPO (Shao et al. 2024, DeepSeekMath, eq. 3): rewards normalised within their group.

A_i = (R_i - mean) / (std + 1e-6), with the sample standard deviation (ddof 1), as verl has it. Unlike verl, a group of
one has advantage 0: there is nothing to compare it with (`reinforce` takes the reward itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rolltap.trainer_client.advantages.base import EPSILON


def grpo(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    return [_normalised(rewards) for rewards in groups]


def _normalised(rewards: Sequence[float]) -> list[float]:
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean, spread = fmean(rewards), stdev(rewards)
    return [(reward - mean) / (spread + EPSILON) for reward in rewards]
