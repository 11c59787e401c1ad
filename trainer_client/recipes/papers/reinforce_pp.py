"""REINFORCE++: Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization".

    A = (R - mean) / std        over all trained tokens of the step (ddof 0)
    baseline: R is first taken off its group's mean (REINFORCE++ with baseline)

The paper puts the KL into the reward; here it is `loss.kl` in the loss, as in its variant with baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import EPSILON, centre


@dataclass
class ReinforcePP(Recipe):
    baseline: bool = False

    def credit(self, step: Step) -> Credit:
        values = centre(step.rewards, step.groups) if self.baseline else step.rewards
        tokens = np.array([rollout.tokens for rollout in step.rollouts], np.float64)
        if not tokens.sum():
            return step.broadcast(values)
        mean = np.average(values, weights=tokens)
        deviation = np.sqrt(np.average((values - mean) ** 2, weights=tokens))
        return step.broadcast((values - mean) / (deviation + EPSILON))
