"""AEPO: "Agentic Entropy-Balanced Policy Optimization", its policy half.

    A'_t = A (1 + strength z(H_t))        z: over the trained tokens of the step, population deviation
    where A' > 0 and rho > 1 + high: the gain is (1 + high) rho / sg(rho) A', so a clipped token keeps its gradient

A is GRPO's, H the entropy by the trainer's weights before the step. Its rollout half branches where the entropy after a
tool's answer is high and needs forks. The form of A' and of the clip are the abstract's and the released code's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rolltap.trainer_client.data.step import POLICY, Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import EPSILON

if TYPE_CHECKING:
    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.loss import PolicyLoss, Terms
    from rolltap.trainer_client.model.network import Predictions


@dataclass
class AEPO(Recipe):
    reads_policy = True
    strength: float = 0.2

    @property
    def trains_zero_rows(self) -> bool:
        return False

    def credit(self, step: Step) -> Credit:
        """z = [-1, 0, 2] and A = 1 → [.8, 1, 1.4]."""
        given, entropies = super().credit(step), [row.astype(np.float64) for row in step.readings[POLICY].entropy]
        masks = [row.segment.loss_mask & step.rollouts[row.rollout].trained for row in step.rows]
        trained = np.concatenate([np.zeros(0), *(row[mask] for row, mask in zip(entropies, masks, strict=True))])
        if not len(trained):
            return given
        mean, deviation = trained.mean(), trained.std()
        scales = (1 + self.strength * (row - mean) / (deviation + EPSILON) for row in entropies)
        return replace(
            given,
            advantages=tuple(np.float32(a * scale) for a, scale in zip(given.advantages, scales, strict=True)),
        )

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        terms = policy_loss(predicted, batch)
        bound = 1 + policy_loss.clip_high
        held_M = terms.clipped_M & (batch.advantages_M > 0)
        # rho / sg(rho) is 1, and its gradient that of log pi: the value stays the clipped one.
        moving_M = (predicted.logprobs_M - predicted.logprobs_M.detach()).exp() - 1
        kept_M = terms.correction_M * bound * batch.advantages_M * moving_M * held_M
        return replace(terms, loss=terms.loss - (kept_M * batch.weights_M).sum())
