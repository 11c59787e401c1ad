"""REINFORCE: Williams 1992, without a baseline.

    A_i = R_i

For groups of one, or rewards that are centred already.
"""

from __future__ import annotations

from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.step import Credit, Step


class Reinforce(Recipe):
    def credit(self, step: Step) -> Credit:
        return step.broadcast(step.rewards)
