"""A method of one's own: GRPO that learns less from what failed than from what worked."""

from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import normalise


@dataclass
class Bolder(Recipe):
    settings = {"loss": {"clip_high": 0.28}}
    blame: float = 0.5  # an option: `[trainer.options] blame = 0.2`

    def credit(self, step: Step) -> Credit:
        advantages = normalise(step.rewards, step.groups)
        return step.broadcast(np.where(advantages < 0, self.blame * advantages, advantages))
