"""Which sessions a training dataset takes: those that a lease would train. The others are counted by reason.

A lease has no rows for an unscorable rollout and no loss for a masked one. It has no group whose rollouts have not all
ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.types import EVALUATION, PURPOSE_TAG, RolloutStatus, Scoring

LeftOut = Literal["running", "failed", "unscorable", "masked", "evaluation"]
LEFT_OUT: tuple[LeftOut, ...] = get_args(LeftOut)

_STATUSES: Mapping[RolloutStatus, LeftOut] = {
    RolloutStatus.PENDING: "running",
    RolloutStatus.RUNNING: "running",
    RolloutStatus.FAILED: "failed",
    RolloutStatus.CANCELLED: "failed",
    RolloutStatus.LOST: "failed",
}
_SCORINGS: Mapping[Scoring, LeftOut] = {Scoring.UNSCORABLE: "unscorable", Scoring.MASKED: "masked"}


def left_out(item: ExportItem) -> LeftOut | None:
    """The reason why a lease would not train the session; None if it would, or if the session has no rollout."""
    if item.session.tags.get(PURPOSE_TAG) == EVALUATION:
        return "evaluation"
    if item.rollout is None:
        return None
    return _STATUSES.get(item.rollout.status) or _SCORINGS.get(item.rollout.scoring)
