"""Leased groups to rows, the unit that foreign trainers train: a segment with its rollout's advantage and weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolltap.contract.leases import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.collate import TEMPERATURE
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


def rows_of(groups: Sequence[LeasedGroup], recipe: Recipe, temperature: float = 1.0) -> list[TrainedRow]:
    """The step's rows, group by group, those of a rollout together, for a trainer that computes at `temperature`.

    `ConfigError` for a recipe that is more than one advantage a row, which is what foreign trainers take, and for
    tokens that were sampled at another temperature: their ratios would be wrong.
    """
    check_recipe(recipe)
    step = view(groups)
    credit = recipe.credit(step)
    check_credit(credit, step)
    if credit.weights is not None:
        raise ConfigError("this recipe weighs tokens one by one: take another, or rolltap train")
    found = []
    for row, advantages in zip(step.rows, credit.advantages, strict=True):
        rollout, mask = step.rollouts[row.rollout], row.segment.loss_mask
        if rollout.trained:
            if np.ptp(advantages[mask]) > 0:
                raise ConfigError("this recipe credits tokens one by one: take another, or rolltap train")
            _check_temperature(row.segment, rollout.id, temperature)
            share = int(mask.sum()) / rollout.tokens
            group = groups[rollout.group].group.id
            found.append(TrainedRow(group, rollout.id, row.segment, float(advantages[mask][0]), share))
    return found


def check_recipe(recipe: Recipe) -> None:
    """`ConfigError` for a recipe that is more than its advantages: the rest of it would be left out unseen."""
    own = type(recipe)
    parts = ("loss", "updates", "passes", "networks", "replay", "turn_cap", "state")
    changed = [part for part in parts if getattr(own, part) is not getattr(Recipe, part)]
    changed += ["reads_policy"] * own.reads_policy
    if own is not Recipe and own.credit is Recipe.credit:
        changed.append("settings")
    if changed:
        raise ConfigError(
            f"recipe {own.__name__} has more than advantages ({', '.join(changed)}), and this trainer is given nothing "
            "else: take another, or rolltap train"
        )


def _check_temperature(part: Segment, rollout: str, temperature: float) -> None:
    recorded = part.extras.get(TEMPERATURE, np.ones(len(part), np.float32))[part.loss_mask]
    sampled = np.nan_to_num(recorded, nan=1.0)
    other = sampled[~np.isclose(sampled, temperature)]
    if len(other):
        raise ConfigError(
            f"rollout {rollout} was sampled at temperature {other[0]:g}, the trainer computes at {temperature:g}: set "
            "the trainer's temperature, or policies.NAME.pin.temperature of the server"
        )
