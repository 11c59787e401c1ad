"""AEM: "AEM: Adaptive Entropy Modulation for Multi-Turn Agentic Reinforcement Learning".

    H_t = mean entropy of the reply's tokens, taken to [0, 1] by the least and the most of its group
    alpha_t = exp(-strength H_t) / mean over the group of exp(-strength H)        A'_t = alpha_t A

A is GRPO's. A group whose entropies lie within `least_range` keeps A. Entropies are the trainer's before the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.data.step import POLICY, Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import Numbers, normalise


def modulation(entropies: Numbers, strength: float, least_range: float) -> Numbers:
    """alpha of one group's replies: [.2, .6, 1] with strength 1 → [1.519, .922, .559]."""
    low, high = entropies.min(), entropies.max()
    if high - low < least_range:
        return np.ones(len(entropies))
    scores = np.exp(-strength * (entropies - low) / (high - low))
    return scores / scores.mean()


@dataclass
class AEM(Recipe):
    needs = ("turns",)
    reads_policy = True
    strength: float = 1.0
    least_range: float = 0.1

    def credit(self, step: Step) -> Credit:
        advantages = normalise(step.rewards, step.groups)[step.turn_rollouts]
        entropies = step.over_turns(step.readings[POLICY].entropy)
        for group in np.unique(step.turn_groups):
            own = step.turn_groups == group
            advantages[own] *= modulation(entropies[own], self.strength, self.least_range)
        return step.broadcast_turns(advantages)
