"""Turn rewards in GRPO and RLOO: "A Practitioner's Guide to Multi-turn Agentic Reinforcement Learning", 2025.

The paper gives the rewards of turns to every estimator alike; PPO is recipe `ppo`. With r_t the turn's own rewards and
the rollout's reward at its last turn:

    G_t = sum over k >= t of gamma^(k-t) r_k
    grpo: A_t = (G_t - mean) / (std + 1e-6)        rloo: A_t = (G_t - mean) n / (n - 1)

mean, std and n are of the same turn index in the group: without turn rewards and with gamma 1 that is GRPO or RLOO.
The paper's abstract leaves the baseline of a dense return open; this one is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import against_others, keyed, normalise, returns


@dataclass
class TurnGRPO(Recipe):
    needs = ("turn_rewards",)
    gamma: float = 1.0
    estimator: Literal["grpo", "rloo"] = "grpo"

    def credit(self, step: Step) -> Credit:
        to_go = returns(step.with_outcome(), step.sequences(), self.gamma)
        alike = keyed(step.turn_groups, (turn.agent for turn in step.turns), (turn.index for turn in step.turns))
        estimate = normalise if self.estimator == "grpo" else against_others
        return step.broadcast_turns(estimate(to_go, alike))
