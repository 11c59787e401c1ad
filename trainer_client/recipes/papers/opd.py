"""OPD: on-policy distillation from a served teacher (Agarwal et al. 2023, "On-Policy Distillation of Language Models",
arXiv 2306.13649; Lu 2025, Thinking Machines Lab).

    A_t = strength (log pi_teacher(token) - log pi(token))        the negative reverse KL, token by token

on the tokens that the student sampled, with log pi as its engine recorded it, by the clipped policy gradient, a mean
over tokens. Rewards are not used. The teacher is a policy of the same server (`teacher_policy`) with the student's
tokenizer: its engine scores the rows (`POST /policies/{name}/score`), so that the trainer's memory holds one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rolltap.errors import ConfigError
from rolltap.trainer_client.data.step import Credit, ScoredPass, Step
from rolltap.trainer_client.recipes.base import Recipe


@dataclass
class OPD(Recipe):
    settings = {"loss": {"normalise": "token"}}
    teacher_policy: str = ""
    strength: float = 1.0

    def passes(self, step: Step) -> Mapping[str, ScoredPass]:
        if not self.teacher_policy:
            raise ConfigError("trainer.options.teacher_policy: name the policy that scores what the student sampled")
        return {"teacher": ScoredPass(self.teacher_policy)}

    def credit(self, step: Step) -> Credit:
        """Tokens of log-prob ln .5 that the teacher gives ln .25 and ln .8 → -.6931 and .4700."""
        pairs = zip(step.rows, step.readings["teacher"].logprobs, strict=True)
        return Credit(
            tuple(
                np.where(row.segment.loss_mask, self.strength * (teacher - row.segment.logprobs), 0).astype(np.float32)
                for row, teacher in pairs
            )
        )
