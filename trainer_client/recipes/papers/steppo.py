"""StepPO: "StepPO: Step-Aligned Policy Optimization for Agentic Reinforcement Learning"; as in Agent-R1's code.

A step is a reply. With r_t the reply's rewards and V_t the value where its prompt ends:

    delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)        target_t = A_t + V_t

A is whitened over the batch's steps and given to all tokens of the reply; the critic learns at the prompt's end only.
The critic is a linear head on the policy's last hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.data.step import POLICY, Credit, Step, ValueHead
from rolltap.trainer_client.recipes.critic import CriticRecipe, with_turn_targets
from rolltap.trainer_client.recipes.estimators import Numbers, gae, whiten


@dataclass
class StepPO(CriticRecipe):
    needs = ("turns",)
    reads_policy = True
    heads = {"value": ValueHead(lr=1e-4)}
    gamma: float = 1.0
    lam: float = 0.95

    def credit(self, step: Step) -> Credit:
        values, rewards = step.read_turns(step.readings[POLICY].values["value"]), step.with_outcome()
        advantages = np.zeros(len(values))
        for sequence in step.sequences():
            advantages[sequence] = gae(rewards[sequence], values[sequence], self.gamma, self.lam)
        credit = step.broadcast_turns(self.shaped(advantages))
        return with_turn_targets(credit, step, "value", advantages + values)

    def shaped(self, advantages: Numbers) -> Numbers:
        """What the policy is given of the estimated advantages [T]."""
        return whiten(advantages)
