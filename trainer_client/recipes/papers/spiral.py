"""SPIRAL: Liu et al. 2025, "SPIRAL: Self-Play on Zero-Sum Games Incentivizes Reasoning", role-conditioned advantages.

    A = R_role - b_role        b_role <- decay b_role + (1 - decay) R_role, from 0, after each game

to every turn of the role in the game; gamma 1, no KL. R_role is the sum of the `role:<agent>` rewards, or the rollout's
reward where there is none. Baselines are kept by task tags and role (a game each, where tasks are tagged by game), and
saved with checkpoints. For zero-sum games: a cooperative one was reported to collapse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe


@dataclass
class SPIRAL(Recipe):
    needs = ("role_rewards",)
    decay: float = 0.95
    baselines: dict[str, float] = field(default_factory=dict, init=False)

    def credit(self, step: Step) -> Credit:
        advantages = np.zeros(len(step.turns))
        for turns in step.sequences(by_agent=True):
            first = step.turns[turns[0]]
            game = step.rollouts[first.rollout]
            key = "/".join([*game.tags, first.agent])
            reward = game.roles.get(first.agent, game.reward)
            baseline = self.baselines.get(key, 0.0)
            advantages[turns] = reward - baseline
            self.baselines[key] = self.decay * baseline + (1 - self.decay) * reward
        return step.broadcast_turns(advantages)
