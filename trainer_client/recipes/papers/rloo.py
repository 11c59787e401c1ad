"""RLOO: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE-Style Optimization", eq. 8.

    A_i = R_i - mean of the group's others = (R_i - mean_g) G / (G - 1)

A group of one has no others: advantage 0. The paper has one rollout weigh as much as another. It takes on-policy
samples without a clip; here the clip of `[trainer.loss]` stays, since groups may be stale.
"""

from __future__ import annotations

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import against_others


class RLOO(Recipe):
    settings = {"loss": {"normalise": "rollout"}}

    def credit(self, step: Step) -> Credit:
        return step.broadcast(against_others(step.rewards, step.groups))
