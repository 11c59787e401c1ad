"""Skill-SD: "Skill-SD: Skill-Conditioned Self-Distillation for Multi-turn LLM Agents", eq. 10 to 14.

    l = log pi(token) - log pi_teacher(token | skill)        L = L_GRPO + strength * mean of rho (e^(-l) - 1 + l)

rho is the policy's ratio to what sampled the token. The teacher is the policy itself at the start of the step (synced
each iteration) with a skill in front of its prompt; the paper warns of .01 for the strength. The skill is the rollout's
`hint`: a summary of finished runs, written by whoever submits tasks. It stands before the row's first token. Rollouts
without a hint have only GRPO's loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rolltap.trainer_client.loss import MOST_LOG_RATIO
from rolltap.trainer_client.recipe import Pass, Recipe
from rolltap.trainer_client.step import POLICY, Credit, Step

if TYPE_CHECKING:
    from torch import Tensor

    from rolltap.trainer_client.collate import Batch
    from rolltap.trainer_client.loss import PolicyLoss, Terms
    from rolltap.trainer_client.network import Predictions


def distance(logprobs_M: Tensor, teacher_M: Tensor) -> Tensor:
    """e^(-l) - 1 + l of each token: l = .2 → .0187, so that with rho 1.1 the term is .0206."""
    difference_M = (logprobs_M - teacher_M).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return (-difference_M).exp() - 1 + difference_M


@dataclass
class SkillSD(Recipe):
    needs = ("hints",)
    strength: float = 0.001

    def passes(self, step: Step) -> Mapping[str, Pass]:
        return {"teacher": Pass(POLICY, step.hinted())}

    def credit(self, step: Step) -> Credit:
        return super().credit(step).carrying(teacher=step.readings["teacher"].logprobs, hinted=step.has_hint)

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        terms = policy_loss(predicted, batch)
        ratio_M = (predicted.logprobs_M - batch.logprobs_M).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
        apart_M = ratio_M * distance(predicted.logprobs_M, batch.extra["teacher"])
        return replace(
            terms, loss=terms.loss + self.strength * (apart_M * batch.extra["hinted"] * batch.weights_M).sum()
        )
