"""Leased groups to rows, the unit that foreign trainers train: a segment with its rollout's advantage and weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolltap.contract.leases import LeasedGroup
from rolltap.trainer_client.scoring import Scorer
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


def rows_of(groups: Sequence[LeasedGroup], scorer: Scorer) -> list[TrainedRow]:
    """The step's rows, group by group, those of a rollout together."""
    owner = {record.rollout.id: group.group.id for group in groups for record in group.rollouts}
    return [
        TrainedRow(
            owner[rollout.id],
            rollout.id,
            segment,
            rollout.advantage,
            int(segment.loss_mask.sum()) / rollout.tokens,
        )
        for rollout in scorer(groups)
        for segment in rollout.segments
    ]
