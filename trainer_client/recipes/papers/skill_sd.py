"""Skill-SD: "Skill-SD: Skill-Conditioned Self-Distillation for Multi-turn LLM Agents", eq. 10 to 14.

    l = log pi(token) - log pi_teacher(token | skill)        L = L_GRPO + strength * mean of rho (e^(-l) - 1 + l)

rho is the policy's ratio to what sampled the token. The teacher is the policy itself at the start of the step (synced
each iteration) with a skill in front of its prompt; the paper warns of .01 for the strength. The skill is the rollout's
`hint`: a summary of finished runs, written by whoever submits tasks. It stands before the row's first token. Rollouts
without a hint have only GRPO's loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolltap.trainer_client.data.step import POLICY, Pass, Step
from rolltap.trainer_client.model.loss import MOST_LOG_RATIO
from rolltap.trainer_client.recipes.hinted_teacher import HintedTeacher

if TYPE_CHECKING:
    from torch import Tensor

    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.network import Predictions


@dataclass
class SkillSD(HintedTeacher):
    strength: float = 0.001

    def passes(self, step: Step) -> Mapping[str, Pass]:
        return {"teacher": Pass(POLICY, step.hinted())}

    def distance(self, predicted: Predictions, batch: Batch) -> Tensor:
        """l = .2 and rho = 1.1 → .0206."""
        ratio_M = (predicted.logprobs_M - batch.logprobs_M).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
        return ratio_M * super().distance(predicted, batch)
