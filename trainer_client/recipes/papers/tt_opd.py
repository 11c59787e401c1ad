"""TT-OPD: "Healthcare AI GYM for Medical Agents", turn-level truncated on-policy distillation.

    teacher <- decay * teacher + (1 - decay) * policy, every `every` steps
    L = L_GRPO + strength * (e^(-l) - 1 + l), on every turn, right or wrong
    l = log pi(token) - log pi_teacher(token | hint)

The teacher sees the rollout's `hint` before the row's first token. The length reward of the paper is `length_reward`,
for the evaluator. As in the released final run, turns are not truncated. Groups of 3 in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rolltap.trainer_client.data.step import Pass, ReadNetwork, Step
from rolltap.trainer_client.recipes.hinted_teacher import HintedTeacher


def length_reward(correct: bool, tokens: int, limit: int = 12_288) -> float:
    """Right: 1.1 falling to .7 on a cosine; wrong: 0 to -.3; beyond the limit -.5. Half the limit → .9 or -.15."""
    if tokens >= limit:
        return -0.5
    first, last = (1.1, 0.7) if correct else (0.0, -0.3)
    return last + 0.5 * (first - last) * (1 + math.cos(math.pi * tokens / limit))


@dataclass
class TTOPD(HintedTeacher):
    settings = {"optimiser": {"lr": 5e-7}}
    strength: float = 4.0
    decay: float = 0.995
    every: int = 5

    def networks(self) -> Mapping[str, ReadNetwork]:
        return {"teacher": ReadNetwork(decay=self.decay, every=self.every)}

    def passes(self, step: Step) -> Mapping[str, Pass]:
        return {"teacher": Pass("teacher", step.hinted())}
