"""Leased groups to rows, the unit that foreign trainers train: a segment with its rollout's advantage and weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolltap.contract.leases import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.step import check_credit, view
from rolltap.types import Segment


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRow:
    """One segment that holds trained tokens.

    `share` is what the row has of its rollout's trained tokens: the shares of a rollout's rows add up to 1.
    """

    group: str
    rollout: str
    segment: Segment
    advantage: float
    share: float

    @property
    def tokens(self) -> int:
        """How many of its tokens are trained."""
        return int(self.segment.loss_mask.sum())


def rows_of(groups: Sequence[LeasedGroup], recipe: Recipe) -> list[TrainedRow]:
    """The step's rows, group by group, those of a rollout together.

    `ConfigError` for a recipe that gives the tokens of a row several advantages: foreign trainers take one.
    """
    step = view(groups)
    credit = recipe.credit(step)
    check_credit(credit, step)
    found = []
    for row, advantages in zip(step.rows, credit.advantages, strict=True):
        rollout, mask = step.rollouts[row.rollout], row.segment.loss_mask
        if rollout.trained:
            if np.ptp(advantages[mask]) > 0:
                raise ConfigError("this recipe credits tokens one by one: take another, or rolltap train")
            share = int(mask.sum()) / rollout.tokens
            group = groups[rollout.group].group.id
            found.append(TrainedRow(group, rollout.id, row.segment, float(advantages[mask][0]), share))
    return found
