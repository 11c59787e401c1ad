"""REINFORCE: Williams 1992, without a baseline.

    A_i = R_i

For groups of one, or rewards that are centred already.
"""

from __future__ import annotations

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe


class Reinforce(Recipe):
    def credit(self, step: Step) -> Credit:
        return step.broadcast(step.rewards)
