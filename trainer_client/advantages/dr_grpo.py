"""Dr. GRPO (Liu et al. 2025): the group mean is taken off, nothing is divided by the spread.

The paper's other half, a loss summed over a constant length, is `normalise = "constant"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def dr_grpo(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[reward - fmean(rewards) for reward in rewards] for rewards in groups]
