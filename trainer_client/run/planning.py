"""Plans a step by the settings and the recipe: leased groups to rows with credit, and rows to updates and packs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from rolltap.contract.trainer import LeasedGroup, RolloutRecord
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.packing import Pack, PackedRow, Packer
from rolltap.trainer_client.data.scoring import Overlong, informative, token_weights, trained_tokens
from rolltap.trainer_client.data.step import Credit, PolicyReading, RowArrays, RowView, Step, check_credit, view
from rolltap.trainer_client.model.learner import Readout
from rolltap.trainer_client.model.loss import Correction, PolicyLoss
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.settings import LossSettings, OptimiserSettings, TrainerSettings
from rolltap.types import Float32

NO_EXTRA: Mapping[str, Float32] = {}


def make_step(
    groups: Sequence[LeasedGroup], loss: LossSettings, number: int = 1, tokenizer: Path | None = None
) -> Step:
    """The step of the groups, as the recipe sees it; rewards include the length penalty of the settings.

    With `drop_zero_variance`, groups without variance are left out, unless no group has variance: they dilute the loss.
    """
    if loss.drop_zero_variance:
        groups = [group for group in groups if group.replay or informative(group)] or groups
    limit = loss.overlong_limit
    overlong = Overlong(limit, min(loss.overlong_buffer, limit)) if limit else None

    def reward(record: RolloutRecord) -> float:
        value = record.reward or 0.0
        return value if overlong is None else value + overlong.penalty(trained_tokens(record))

    return replace(view(groups, number, reward), tokenizer=tokenizer)


def rows_to_train(
    step: Step, credit: Credit, loss: LossSettings, *, zeros: bool = False, whole: bool = False
) -> list[PackedRow]:
    """The rows that have a gradient, with their arrays.

    `zeros`: includes rows whose advantages are all 0. `whole`: includes all rows of a rollout if one has a gradient.
    `AlignmentError` names the rollout and turn if the credit is not finite there.
    """
    check_credit(credit, step)
    trained = np.array([rollout.trained for rollout in step.rollouts], bool)
    lengths = np.array([rollout.tokens for rollout in step.rollouts], np.int64)
    weights_R = token_weights(lengths, trained, loss.normalise, loss.length)
    rows, kept = [], set()
    for number, row in enumerate(step.rows):
        weights = np.full(len(row.segment), weights_R[row.rollout], np.float32)
        if credit.weights is not None:
            weights *= credit.weights[number]
        advantages, mask = credit.advantages[number], row.segment.loss_mask
        extra = {name: arrays[number] for name, arrays in credit.extra.items()} or NO_EXTRA
        rows.append(PackedRow(row.segment, row.rollout, number, advantages, weights, extra, files=step.images))
        if weights[mask].any() and (zeros or loss.kl or advantages[mask].any()):
            kept.add(row.rollout if whole else number)
    return [row for row in rows if (row.rollout if whole else row.number) in kept]


def rows_to_read(step: Step, views: Sequence[RowView]) -> list[PackedRow]:
    """The views as rows without credit."""
    return [
        PackedRow.uniform(one.segment, step.rows[one.row].rollout, number, files=step.images)
        for number, one in enumerate(views)
    ]


def read_views(
    step: Step, views: Sequence[RowView], packs: Sequence[Pack], readouts: Sequence[Readout]
) -> PolicyReading:
    """The readouts of the packs of `rows_to_read`, as arrays over the step's rows."""
    names = readouts[0].values if readouts else ()

    def placed(of: Callable[[Readout], Float32]) -> RowArrays:
        arrays = tuple(np.zeros(len(row.segment), np.float32) for row in step.rows)
        for pack, readout in zip(packs, readouts, strict=True):
            start, values = 0, of(readout)
            for row in pack.rows:
                shown = views[row.number]
                arrays[shown.row][shown.places] = values[start : start + len(shown.places)]
                start += len(shown.places)
        return arrays

    return PolicyReading(
        placed(lambda readout: readout.logprobs),
        placed(lambda readout: readout.entropy),
        {name: placed(lambda readout, name=name: readout.values[name]) for name in names},
    )


def minibatches(rows: Sequence[PackedRow], optimiser: OptimiserSettings, order: random.Random) -> list[list[PackedRow]]:
    """The rows of each optimiser step: every epoch shuffles the rollouts into minibatches of equal weight."""
    rollouts = [list(own) for _, own in groupby(rows, key=lambda row: row.rollout)]
    parts = optimiser.minibatches
    updates = []
    for _ in range(optimiser.epochs):
        if parts > 1:
            order.shuffle(rollouts)
        for part in range(parts):
            updates.append([row.scaled(parts) for rollout in rollouts[part::parts] for row in rollout])
    return [update for update in updates if update]


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the optimiser steps of a training step."""

    recipe: Recipe
    settings: TrainerSettings

    def updates(self, step: Step, credit: Credit) -> list[list[PackedRow]]:
        """The rows of each optimiser step, in their order."""
        ordered = self.recipe.updates(step, credit)
        if ordered is not None:
            return [rows for one in ordered if (rows := self._rows(step, one))]
        order = random.Random(f"{self.settings.seed}/{step.number - 1}")
        return minibatches(self._rows(step, credit), self.settings.optimiser, order)

    def _rows(self, step: Step, credit: Credit) -> list[PackedRow]:
        return rows_to_train(
            step, credit, self.settings.loss, zeros=self.recipe.trains_zero_rows, whole=self._whole_rollouts
        )

    @property
    def _whole_rollouts(self) -> bool:
        """Whether the loss needs all rows of a rollout in one pass."""
        return self.settings.loss.ratio == "sequence" or self.recipe.whole

    def packer(self, ranks: int, *, alone: bool) -> Packer:
        """The packer of the run. `alone`: the model computes each row in a pass of its own.

        `ConfigError` if the loss needs whole rollouts in one pack and the model needs `alone`.
        """
        compute = self.settings.compute
        whole = self._whole_rollouts
        if whole and alone:
            raise ConfigError(
                "the loss needs all rows of a rollout in one pass, and this model's linear attention computes each row "
                'alone: choose loss.ratio = "token" or another recipe'
            )
        replay = self.settings.router.replay != "off"
        return Packer(compute.token_budget, compute.share_prefixes, whole, ranks, alone, replay)


def policy_loss(settings: LossSettings) -> PolicyLoss:
    """The policy loss of the settings."""
    return PolicyLoss(
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        clip_dual=settings.clip_dual,
        ratio=settings.ratio,
        correction=Correction(settings.correction, settings.importance_cap, settings.importance_band),
        kl=settings.kl,
    )
