"""CM2: "CM2: Reinforcement Learning with Checklist Rewards for Multi-Turn and Multi-Step Agentic Tool Use".

    A_t = s_t - mean of s at the same turn index in the group        s_t = sum over the checklist of weight * passed

to all tokens of the turn; a turn index with at most `least` samples in the group carries no loss. The evaluator gives
s_t as a reward of the turn's call; a turn whose judge failed has none, and is left out of mean and loss. Importance
weights are truncated at 2. The authors drop a whole sequence below a ratio of 1e-4; here the token is left out. What
they ship as default is the trajectory-level variant: recipe `dr_grpo`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import centre, keyed


@dataclass
class CM2(Recipe):
    settings = {
        "loss": {"correction": "truncated", "importance_cap": 2.0, "importance_band": (1e-4, np.inf), "kl": 1e-4}
    }
    needs = ("turn_rewards",)
    least: int = 4

    def credit(self, step: Step) -> Credit:
        judged = np.array([turn.rewarded for turn in step.turns], bool)
        alike = keyed(step.turn_groups, (turn.agent for turn in step.turns), (turn.index for turn in step.turns))
        advantages, counts = np.zeros(len(judged)), judged.copy()
        if judged.any():
            advantages[judged] = centre(step.turn_rewards[judged], alike[judged])
            counts &= np.bincount(alike[judged], minlength=alike.max() + 1)[alike] > self.least
        return step.broadcast_turns(advantages).weighted(step.spread_turns(counts))
