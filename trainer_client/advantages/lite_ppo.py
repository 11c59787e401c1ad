"""Lite PPO (Liu et al. 2025, "Tricks or Traps"): the group mean is taken off, the whole step's spread divides.

Meant for `normalise = "token"` and the plain clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rolltap.trainer_client.advantages.base import EPSILON


def lite_ppo(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    rewards = [reward for group in groups for reward in group]
    spread = stdev(rewards) if len(rewards) > 1 else 1.0
    return [[(reward - fmean(group)) / (spread + EPSILON) for reward in group] for group in groups]
