"""The value side of recipes with heads: `CriticRecipe`, targets into the batch, and the clipped regression on them.

A head's value is read where a token is predicted, so a turn's value is the one at its first trained token, the state
that its prompt ends in. A turn's regression counts as its tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rolltap.trainer_client.data.step import POLICY, Credit, RowArrays, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import Numbers

if TYPE_CHECKING:
    from torch import Tensor

    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.loss import PolicyLoss, Terms
    from rolltap.trainer_client.model.network import Predictions


@dataclass
class CriticRecipe(Recipe):
    """A recipe whose loss is the policy's and, for each of its `heads`, the regression on that head's targets."""

    value_clip: float = 0.5
    """How far a value may move from what it was before the step; inf: as far as it likes."""

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        terms = policy_loss(predicted, batch)
        values = sum(value_loss(predicted, batch, name, self.value_clip) for name in self.heads)
        return replace(terms, loss=terms.loss + values)


def with_targets(credit: Credit, head: str, before: RowArrays, targets: RowArrays, shares: RowArrays) -> Credit:
    """The credit with what `head` should say, what it said before the step, and how much each token counts."""
    return credit.carrying(**{f"{head}_before": before, f"{head}_target": targets, f"{head}_share": shares})


def with_turn_targets(
    credit: Credit,
    step: Step,
    head: str,
    targets: Numbers,
    at: Sequence[int] | None = None,
    shares: Numbers | float = 1.0,
) -> Credit:
    """The same for one target [T] a turn, at the token `at` of it; `shares` [T] scale how much each turn counts."""
    before = step.readings[POLICY].values[head]
    sizes = shares * np.array([len(turn.places) for turn in step.turns], np.float64)
    return with_targets(credit, head, before, step.place_turns(targets, at), step.place_turns(sizes, at))


def value_loss(predicted: Predictions, batch: Batch, head: str, clip: float) -> Tensor:
    """1/2 max((V - target)^2, (clip(V, V_before - c, V_before + c) - target)^2), weighed as the policy's tokens are.

    With a value of .9 that was .2, target 1 and clip .5, the clipped .7 counts: .045.
    """
    value_M, target_M, before_M = (
        predicted.values[head],
        batch.extra[f"{head}_target"],
        batch.extra[f"{head}_before"],
    )
    held_M = before_M + (value_M - before_M).clamp(-clip, clip)
    worst_M = ((value_M - target_M) ** 2).maximum((held_M - target_M) ** 2)
    return (0.5 * worst_M * batch.extra[f"{head}_share"] * batch.weights_M).sum()
