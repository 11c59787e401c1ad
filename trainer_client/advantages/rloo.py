"""RLOO (Ahmadian et al. 2024): each rollout against the mean of the others, A_i = (R_i - mean) G / (G - 1).

A group of one has no others: advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def rloo(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    return [_against_others(rewards) for rewards in groups]


def _against_others(rewards: Sequence[float]) -> list[float]:
    size = len(rewards)
    if size < 2:
        return [0.0] * size
    mean = fmean(rewards)
    return [(reward - mean) * size / (size - 1) for reward in rewards]
