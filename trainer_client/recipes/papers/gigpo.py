"""GiGPO: Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training".

    A_t = A_episode + weight * A_step        (eq. 8)
    A_episode: the rollout's total reward within its group; A_step: G_t = sum gamma^(k-t) r_k within the turns of the
    group that were shown the same observation (anchor states, eq. 6 and 7)

Each is centred, and divided by its standard deviation with `spread`. The group's mean is over rollouts; the released
code takes it over their turns, so that long ones weigh more. The observation is what the turn was shown since
the turn before, token for token. A turn whose observation is seen once has A_step 0, as the paper says (the released
code takes its return as it is).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import centre, keyed, normalise, returns


@dataclass
class GiGPO(Recipe):
    needs = ("turns",)
    gamma: float = 0.95
    weight: float = 1.0
    spread: bool = False

    def credit(self, step: Step) -> Credit:
        scale = normalise if self.spread else centre
        rewards = step.with_outcome()
        total = step.rewards + np.bincount(step.turn_rollouts, step.turn_rewards, minlength=len(step.rollouts))
        anchors = keyed(step.turn_groups, (turn.observed.tobytes() for turn in step.turns))
        episode = scale(total, step.groups)[step.turn_rollouts]
        return step.broadcast_turns(
            episode + self.weight * scale(returns(rewards, step.sequences(), self.gamma), anchors)
        )
