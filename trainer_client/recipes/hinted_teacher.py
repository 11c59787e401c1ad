"""Distillation from a teacher that reads the rollout's hint: what the recipes with such a teacher share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.model.loss import MOST_LOG_RATIO
from rolltap.trainer_client.recipes.base import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.loss import PolicyLoss, Terms
    from rolltap.trainer_client.model.network import Predictions


def distance(logprobs_M: Tensor, teacher_M: Tensor) -> Tensor:
    """e^(-l) - 1 + l of each token, with l = log pi(token) - log pi_teacher(token): l = .2 → .0187."""
    difference_M = (logprobs_M - teacher_M).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return (-difference_M).exp() - 1 + difference_M


@dataclass
class HintedTeacher(Recipe):
    """GRPO, and `strength` times the distance to the pass `teacher`, in rollouts with a hint."""

    needs = ("hints",)
    strength: float = 1.0

    def credit(self, step: Step) -> Credit:
        return super().credit(step).carrying(teacher=step.readings["teacher"].logprobs, hinted=step.has_hint)

    def distance(self, predicted: Predictions, batch: Batch) -> Tensor:
        """[M] The distance of each token."""
        return distance(predicted.logprobs_M, batch.extra["teacher"])

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        terms = policy_loss(predicted, batch)
        apart_M = self.distance(predicted, batch) * batch.extra["hinted"]
        return replace(terms, loss=terms.loss + self.strength * (apart_M * batch.weights_M).sum())
