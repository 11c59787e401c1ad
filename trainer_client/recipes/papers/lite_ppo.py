"""Lite PPO: Liu et al. 2025, "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning".

    A_i = (R_i - mean_g) / (std_batch + 1e-6)        L = mean over the step's tokens

The mean is the group's, the standard deviation that of all rewards of the step (ddof 1). Plain clip, token mean.
"""

from __future__ import annotations

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import EPSILON, centre, spread


class LitePPO(Recipe):
    settings = {"loss": {"normalise": "token"}}

    def credit(self, step: Step) -> Credit:
        everything = np.zeros(len(step.rewards), np.int64)
        return step.broadcast(centre(step.rewards, step.groups) / (spread(step.rewards, everything) + EPSILON))
