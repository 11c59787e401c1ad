"""Leased groups to rollouts with advantages and weights.

What a rollout weighs depends on its trained tokens, not on how many rows its branches made. Its advantage comes from
its group's rewards; its weight per token from one of three ways to take the mean:

- `rollout`: every rollout weighs the same, its tokens share it (GRPO, GSPO);
- `token`: every trained token of the step weighs the same (DAPO);
- `constant`: every token weighs 1 / (rollouts * length), whatever the rollout's own length (Dr. GRPO).

`SCORED` rollouts are in the baseline and the loss, `MASKED` ones in the baseline only, `UNSCORABLE` ones and those
without a reward in neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rolltap.contract.leases import LeasedGroup, RolloutRecord
from rolltap.errors import AlignmentError
from rolltap.trainer_client.advantages.base import AdvantageMethod
from rolltap.types import Scoring, Segment

Normalise = Literal["rollout", "token", "constant"]


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft penalty on length, added to the reward (Yu et al. 2025, eq. 13).

    0 up to `limit - buffer` trained tokens, then falling by 1 over `buffer` tokens, -1 beyond `limit`.
    """

    limit: int
    buffer: int

    def penalty(self, tokens: int) -> float:
        return -min(1.0, max(0.0, (tokens - (self.limit - self.buffer)) / self.buffer))


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRollout:
    """A rollout in the loss. Each of its `tokens` trained tokens has `weight`; `segments` all hold some of them."""

    id: str
    segments: tuple[Segment, ...]
    tokens: int
    advantage: float
    weight: float


@dataclass(frozen=True, slots=True)
class Scorer:
    """How a step's groups are scored. `length` is the constant of `constant`, in tokens."""

    method: AdvantageMethod
    normalise: Normalise = "token"
    length: int = 1
    overlong: Overlong | None = None

    def __call__(self, groups: Sequence[LeasedGroup]) -> list[TrainedRollout]:
        """The rollouts in the loss. `AlignmentError` names the rollout whose record can't be trained."""
        counted = [baseline(group) for group in groups]
        advantages = self.method([[self._reward(record) for record in records] for records in counted])
        trained = [
            (record, advantage, trained_segments(record))
            for records, values in zip(counted, advantages, strict=True)
            for record, advantage in zip(records, values, strict=True)
            if record.rollout.scoring is Scoring.SCORED and trained_tokens(record)
        ]
        total = sum(trained_tokens(record) for record, _, _ in trained)
        return [
            TrainedRollout(
                record.rollout.id,
                segments,
                trained_tokens(record),
                advantage,
                self._weight(trained_tokens(record), len(trained), total),
            )
            for record, advantage, segments in trained
        ]

    def _reward(self, record: RolloutRecord) -> float:
        reward = record.reward or 0.0
        return reward if self.overlong is None else reward + self.overlong.penalty(trained_tokens(record))

    def _weight(self, tokens: int, rollouts: int, total: int) -> float:
        if self.normalise == "token":
            return 1 / total
        return 1 / (rollouts * (tokens if self.normalise == "rollout" else self.length))


def baseline(group: LeasedGroup) -> list[RolloutRecord]:
    """The group's rollouts that are compared with each other."""
    return [
        record
        for record in group.rollouts
        if record.reward is not None and record.rollout.scoring is not Scoring.UNSCORABLE
    ]


def informative(group: LeasedGroup) -> bool:
    """Whether the group's rewards differ: else no comparison teaches anything (DAPO's dynamic filter)."""
    return len({record.reward for record in baseline(group)}) > 1


def trained_segments(record: RolloutRecord) -> tuple[Segment, ...]:
    return tuple(segment for segment in record.trajectory.segments if segment.loss_mask.any())


def trained_tokens(record: RolloutRecord) -> int:
    return sum(int(segment.loss_mask.sum()) for segment in record.trajectory.segments)


def check(group: LeasedGroup, vocabulary: int) -> None:
    """`AlignmentError` for a group that a model of `vocabulary` tokens can't be trained on: it counts a failure."""
    for record in group.rollouts:
        where = f"group {group.group.id}, rollout {record.rollout.id}"
        if record.reward is not None and not math.isfinite(record.reward):
            raise AlignmentError(f"{where}: the reward is {record.reward}")
        for segment in trained_segments(record):
            if segment.loss_mask[0]:
                raise AlignmentError(f"{where}: the first token of a segment is trained, but nothing predicts it")
            if not np.isfinite(segment.logprobs[segment.loss_mask]).all():
                raise AlignmentError(f"{where}: a trained token's log-prob is not finite")
            least, most = int(segment.token_ids.min()), int(segment.token_ids.max())
            if least < 0 or most >= vocabulary:
                raise AlignmentError(f"{where}: token ids from {least} to {most}, of a vocabulary of {vocabulary}")
