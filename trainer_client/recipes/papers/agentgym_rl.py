"""AgentGym-RL: Xi et al. 2025, "AgentGym-RL: Training LLM Agents for Long-Horizon Decision Making", ScalingInter-RL.

    at most rounds[min(floor(step / every), last)] turns a rollout        with GRPO's advantage

The horizon grows as training goes on: steps 0, 99, 100, 250 and 999 → 10, 10, 20, 30, 30 turns. The cap is set on the
policy; attempts that begin after a step have it, and calls past it are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.contract.control import RolloutControl
from rolltap.trainer_client.recipes.base import Recipe


@dataclass
class AgentGymRL(Recipe):
    rounds: tuple[int, ...] = (10, 20, 30)
    every: int = 100

    def after(self, step: int) -> RolloutControl:
        return RolloutControl(max_turns=self.rounds[min(step // self.every, len(self.rounds) - 1)])
