"""AgentFlow (Flow-GRPO): Li et al. 2025, "In-the-Flow Agentic System Optimization for Effective Planning and Tool Use".

The planner is the trained policy; executor, verifier and generator are roles of frozen ones. The outcome is copied to
every call of the planner, and with R the outcomes

    A = (R - mean) / (std + 1e-6)        over the group's rollouts, or with `by_call` over its planner calls

The released code groups calls, so that longer rollouts weigh more: R 1 in one call and 0 in three → mean .25, not .5.
By rollout is the default here, since an agent could else move its baseline by the number of its calls. Groups of 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import normalise


@dataclass
class AgentFlow(Recipe):
    settings = {"loss": {"clip_low": 0.2, "clip_high": 0.3, "kl": 0.001}}
    by_call: bool = False

    def credit(self, step: Step) -> Credit:
        if not self.by_call:
            return super().credit(step)
        return step.broadcast_turns(normalise(step.rewards[step.turn_rollouts], step.turn_groups))
