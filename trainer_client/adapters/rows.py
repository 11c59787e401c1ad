"""Leased groups to rows, the unit of third-party trainers: a segment with its rollout's advantage and weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolltap.contract.trainer import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.recorded import masked_tokens, temperatures
from rolltap.trainer_client.data.step import check_credit, view
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.types import Segment


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRow:
    """One segment with trained tokens.

    `share`: the row's share of its rollout's trained tokens; the shares of a rollout's rows add up to 1.
    """

    group: str
    rollout: str
    segment: Segment
    advantage: float
    share: float

    @property
    def tokens(self) -> int:
        """The number of its trained tokens."""
        return int(self.segment.loss_mask.sum())


def rows_of(groups: Sequence[LeasedGroup], recipe: Recipe, temperature: float = 1.0) -> list[TrainedRow]:
    """The step's rows, group by group, with a rollout's rows together, for a trainer that computes at `temperature`.

    Raises `ConfigError` for a recipe with more than one advantage per row, which third-party trainers don't support,
    and for tokens sampled at another temperature or from a part of the vocabulary: their ratios would be wrong.
    """
    check_recipe(recipe)
    check_images(groups)
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
            if masked_tokens(row.segment):
                raise ConfigError(
                    f"rollout {rollout.id} was sampled from a part of the vocabulary, and this trainer computes over "
                    "all of it: set policies.NAME.sampling_mask = 0 of the server, so that such calls carry no loss, "
                    "or use rolltap train"
                )
            share = int(mask.sum()) / rollout.tokens
            group = groups[rollout.group].group.id
            trained_rows.append(TrainedRow(group, rollout.id, row.segment, float(advantages[mask][0]), share))
    return trained_rows


def check_images(groups: Sequence[LeasedGroup]) -> None:
    """Raises `ConfigError` for groups that show images: adapters give their trainers token ids alone."""
    shown = next((record.rollout.id for group in groups if group.images for record in group.rollouts), None)
    if shown is not None:
        raise ConfigError(f"the prompts of rollout {shown} show images, which this adapter does not take")


def trained_runs(part: Segment) -> list[tuple[int, int]]:
    """The runs of trained tokens as (begin, end), in order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], part.loss_mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def check_recipe(recipe: Recipe) -> None:
    """Raises `ConfigError` for a recipe with more than advantages: the rest would be silently ignored."""
    kind = type(recipe)
    parts = ("loss", "updates", "passes", "networks", "admits", "admits_rollout", "replay", "after", "state")
    extras = [part for part in parts if getattr(kind, part) is not getattr(Recipe, part)]
    extras += ["reads_policy"] * kind.reads_policy
    if kind is not Recipe and kind.credit is Recipe.credit:
        extras.append("settings")
    if extras:
        raise ConfigError(
            f"recipe {kind.__name__} has more than advantages ({', '.join(extras)}), and this trainer is given nothing "
            "else: take another, or rolltap train"
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
