"""Leased groups to rows, the unit that foreign trainers train: a segment with its rollout's advantage and weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolltap.contract.leases import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.sampling import masked_tokens, temperatures
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
    tokens that were sampled at another temperature or from a part of the vocabulary: their ratios would be wrong.
    """
    check_recipe(recipe)
    step = view(groups)
    credit = recipe.credit(step)
    check_credit(credit, step)
    if credit.weights is not None:
        raise ConfigError("this recipe weighs tokens one by one: take another, or rolltap train")
    trained_rows = []
    for row, advantages in zip(step.rows, credit.advantages, strict=True):
        rollout, mask = step.rollouts[row.rollout], row.segment.loss_mask
        if rollout.trained:
            if np.ptp(advantages[mask]) > 0:
                raise ConfigError("this recipe credits tokens one by one: take another, or rolltap train")
            _check_temperature(row.segment, rollout.id, temperature)
            _check_whole_vocabulary(row.segment, rollout.id)
            share = int(mask.sum()) / rollout.tokens
            group = groups[rollout.group].group.id
            trained_rows.append(TrainedRow(group, rollout.id, row.segment, float(advantages[mask][0]), share))
    return trained_rows


def trained_runs(part: Segment) -> list[tuple[int, int]]:
    """Where runs of trained tokens begin and end, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], part.loss_mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


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


def _check_whole_vocabulary(part: Segment, rollout: str) -> None:
    if masked_tokens(part):
        raise ConfigError(
            f"rollout {rollout} was sampled from a part of the vocabulary, and this trainer computes over all of it: "
            "set policies.NAME.sampling_mask = 0 of the server, so that such calls carry no loss, or use rolltap train"
        )


def _check_temperature(part: Segment, rollout: str, temperature: float) -> None:
    recorded = temperatures([part])
    sampled = np.ones(1, np.float32) if recorded is None else recorded
    other = sampled[~np.isclose(sampled, temperature)]
    if len(other):
        raise ConfigError(
            f"rollout {rollout} was sampled at temperature {other[0]:g}, the trainer computes at {temperature:g}: set "
            "the trainer's temperature, or policies.NAME.pin.temperature of the server"
        )
