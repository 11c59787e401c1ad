"""Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective".

    A_i = R_i - mean_g        L = 1/(R * length) * sum over tokens

Nothing is divided by the group's spread or the rollout's own length. `loss.length` is the paper's constant: set it to
the token limit of a rollout.
"""

from __future__ import annotations

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import centre


class DrGRPO(Recipe):
    settings = {"loss": {"normalise": "constant"}}

    def credit(self, step: Step) -> Credit:
        return step.broadcast(centre(step.rewards, step.groups))
