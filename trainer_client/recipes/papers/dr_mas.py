"""Dr. MAS: Feng et al. 2026, "Dr. MAS: Stable Reinforcement Learning for Multi-Agent LLM Systems".

    A_i,k = (R_i - mean_g,k) / (std_g,k + 1e-6)        over the calls of agent k in group g

Every agent is normalised by the statistics of its own calls, one entry a call. An invalid action costs the harness's
own penalty (0.01 in the paper), as a reward of its call. One model may be all agents', or each has its own: then a run
for each trains on the same rollouts. One version of the authors' code counts a rollout once for an agent, others count
its calls, as here; and there an agent with a single call in the group has A = R, here 0.
"""

from __future__ import annotations

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import keyed, normalise


class DrMAS(Recipe):
    needs = ("roles",)

    def credit(self, step: Step) -> Credit:
        rewards = step.rewards[step.turn_rollouts] + step.turn_rewards
        return step.broadcast_turns(normalise(rewards, keyed(step.turn_groups, (turn.agent for turn in step.turns))))
