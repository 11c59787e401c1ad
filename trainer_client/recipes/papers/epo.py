"""EPO: Xu et al. 2025, "EPO: Entropy-Regularized Policy Optimization for LLM Agents Reinforcement Learning".

    L = L_pg - strength (H - c w(t) P)        H: entropy of the tokens, with gradient
    P = `penalty` on tokens whose entropy leaves [low, high] times the mean so far of turns of the same index
    w(x) = 1 - .2 (1 - e^(-2x)) over the first half of the run, .8 e^(-3x) over the second, x from 0 to 1 in each

H and P are weighed as the policy's tokens are. In the released code P comes of comparisons, so it has no gradient;
`hinge` has the described effect: P is how far the entropy is outside. There, w can be switched off, and P acts only
where a turn past half of the horizon is in the micro-batch; here w always applies, and P at every turn with a history.
The advantage is GRPO's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rolltap.trainer_client.data.step import POLICY, Credit, Step
from rolltap.trainer_client.recipes.base import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.loss import PolicyLoss, Terms
    from rolltap.trainer_client.model.network import Predictions


def phase(done: float) -> float:
    """w at a share of the run: 0, .25, .5, .75, 1 → 1, .874, .827, .179, .040."""
    if done <= 0.5:
        return 1 - 0.2 * (1 - math.exp(-2 * done / 0.5))
    return 0.8 * math.exp(-3 * min(1.0, (done - 0.5) / 0.5))


@dataclass
class EPO(Recipe):
    needs = ("turns",)
    reads_policy = True
    entropy_moves = True
    strength: float = 0.001
    low: float = 0.8
    high: float = 1.2
    penalty: float = 0.1
    hinge: bool = False
    steps: int = 150
    history: dict[str, list[float]] = field(default_factory=dict, init=False)
    """Of the turns of each index: the sum of their tokens' entropies, and how many tokens that were."""

    def credit(self, step: Step) -> Credit:
        means = np.array([self._mean(turn.index) for turn in step.turns])
        for turn, entropy in zip(step.turns, step.over_turns(step.readings[POLICY].entropy, np.sum), strict=True):
            total, count = self.history.get(str(turn.index), (0.0, 0))
            self.history[str(turn.index)] = [total + float(entropy), count + len(turn.places)]
        weights = np.where(np.isnan(means), 0.0, phase((step.number - 1) / self.steps))
        bounds = step.spread_turns(np.nan_to_num(means))
        return super().credit(step).carrying(usual=bounds, phase=step.spread_turns(weights))

    def _mean(self, index: int) -> float:
        total, count = self.history.get(str(index), (0.0, 0))
        return total / count if count else math.nan

    def penalties(self, entropy_M: Tensor, usual_M: Tensor) -> Tensor:
        """P of each token; history .5, H [.1, .5, 1.2] → [.1, 0, .1]."""
        below_M, above_M = self.low * usual_M - entropy_M, entropy_M - self.high * usual_M
        if self.hinge:
            return below_M.clamp(min=0) + above_M.clamp(min=0)
        return self.penalty * ((below_M > 0) | (above_M > 0)).float()

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        terms = policy_loss(predicted, batch)
        smooth_M = batch.extra["phase"] * self.penalties(predicted.entropy_M, batch.extra["usual"])
        bonus = ((predicted.entropy_M - smooth_M) * batch.weights_M).sum()
        return replace(terms, loss=terms.loss - self.strength * bonus)
