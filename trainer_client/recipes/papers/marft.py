"""MARFT: Liao et al. 2025, "MARFT: Multi-Agent Reinforcement Fine-Tuning", arXiv 2504.16129: values over calls.

A step is a reply, of whichever agent; k counts the rollout's calls in the order in which they were made:

    delta_k = r_k + gamma V_(k+1) - V_k        A_k = delta_k + gamma lam A_(k+1)        by GAE as in recipe `steppo`
    s_k = exp(mean over the reply's tokens of log pi - log pi_old)                      one clipped ratio a reply

so an agent's reply is paid by what the next agent's prompt is worth. As in the released code at the level of actions
(MARFT-A, `normalization_mode` "token"; its default multiplies the tokens' ratios). The released critic is a network of
its own; here it is a linear head on the policy's hidden state. Left out: an entropy bonus (.01), and training one agent
at a time. With a policy for each agent, a run knows the values of its own calls alone, and bootstraps from their next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.papers.steppo import StepPO

if TYPE_CHECKING:
    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.loss import PolicyLoss, Terms
    from rolltap.trainer_client.model.network import Predictions


@dataclass
class MARFT(StepPO):
    needs = ("turns", "roles")
    gamma: float = 0.99
    value_clip: float = 0.2

    def credit(self, step: Step) -> Credit:
        return super().credit(step).carrying(turn=step.spread_turns(np.arange(len(step.turns))))

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        by_reply = replace(batch, rollouts_M=batch.extra["turn"].long())
        return super().loss(predicted, by_reply, replace(policy_loss, ratio="sequence"))
