"""Which rollouts of a leased group are in the baseline and the loss, and the weight of each token.

A rollout's weight depends on its trained tokens, not on the number of its rows. The loss is a mean, taken in one of
three ways:

- `rollout`: every rollout weighs the same, divided among its tokens (GRPO, GSPO);
- `token`: every trained token of the step weighs the same (DAPO);
- `constant`: every token weighs 1 / (rollouts * length), whatever the rollout's own length (Dr. GRPO).

`SCORED` rollouts are in the baseline and the loss, `MASKED` ones only in the baseline. `UNSCORABLE` ones, those without
a reward and those without sampled tokens are in neither.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rolltap.contract.trainer import LeasedGroup, RolloutRecord, all_equal
from rolltap.errors import AlignmentError
from rolltap.trainer_client.data.recorded import ExpertShape, check_masks
from rolltap.types import Bool, Scoring, Segment

log = logging.getLogger("rolltap.trainer")

Normalise = Literal["rollout", "token", "constant"]


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft penalty on length, added to the reward (Yu et al. 2025, eq. 13).

    It is 0 up to `limit - buffer` trained tokens, falls linearly to -1 at `limit`, and is -1 beyond it.
    """

    limit: int
    buffer: int

    def penalty(self, tokens: int) -> float:
        return -min(1.0, max(0.0, (tokens - (self.limit - self.buffer)) / self.buffer))


def token_weights(tokens: NDArray[np.int64], trained: Bool, normalise: Normalise, length: int) -> NDArray[np.float64]:
    """[R] The weight of each trained token of a rollout; 0 for rollouts that are not `trained`."""
    rollouts, total = max(1, int(trained.sum())), max(1, int(tokens[trained].sum()))
    shares = {
        "token": np.full(len(tokens), 1 / total),
        "rollout": 1 / (rollouts * np.maximum(tokens, 1)),
        "constant": np.full(len(tokens), 1 / (rollouts * length)),
    }
    return np.where(trained, shares[normalise], 0.0)


def baseline(group: LeasedGroup) -> list[RolloutRecord]:
    """The group's rollouts that its baseline is computed from."""
    return [
        record
        for record in group.rollouts
        if record.reward is not None and record.rollout.scoring is not Scoring.UNSCORABLE and record.trajectory.segments
    ]


def has_loss(group: LeasedGroup) -> bool:
    """Whether any reply of the group carries loss."""
    return any(record.rollout.scoring is Scoring.SCORED and trained_segments(record) for record in baseline(group))


def informative(group: LeasedGroup) -> bool:
    """Whether the group's rewards differ. If not, all advantages are 0 (DAPO's dynamic sampling leaves it out)."""
    return not all_equal([record.reward for record in baseline(group) if record.reward is not None])


def trained_segments(record: RolloutRecord) -> tuple[Segment, ...]:
    return tuple(segment for segment in record.trajectory.segments if segment.loss_mask.any())


def trained_tokens(record: RolloutRecord) -> int:
    return sum(int(segment.loss_mask.sum()) for segment in record.trajectory.segments)


def trainable(
    group: LeasedGroup,
    vocabulary: int,
    experts: ExpertShape | None = None,
    *,
    all_routed: bool = False,
    longest: int | None = None,
) -> LeasedGroup:
    """The group as a model with a vocabulary of `vocabulary` tokens takes it; `AlignmentError` if it can't be trained.

    Segments with ids past the vocabulary are left out, with a warning: the proxy masks such replies itself unless
    their upstream has no tokenizer that it could ask. `longest` is the trainer's limit of tokens in a segment: it would
    cut a longer one. `experts` is its mixture: recorded experts must exist in it, and with `all_routed` every trained
    token must have some.
    """
    records = []
    for record in group.rollouts:
        where = f"group {group.group.id}, rollout {record.rollout.id}"
        if record.reward is not None and not math.isfinite(record.reward):
            raise AlignmentError(f"{where}: the reward is {record.reward}")
        segments = record.trajectory.segments
        known = tuple(segment for segment in segments if segment.token_ids.max() < vocabulary)
        if len(known) < len(segments):
            most = max(int(segment.token_ids.max()) for segment in segments)
            log.warning(
                "%s: only %d of its %d segments are trained: token ids up to %d, of a vocabulary of %d",
                where,
                len(known),
                len(segments),
                most,
                vocabulary,
            )
            record = replace(record, trajectory=replace(record.trajectory, segments=known))
        records.append(record)
        for segment in trained_segments(record):
            if segment.loss_mask[0]:
                raise AlignmentError(f"{where}: the first token of a segment is trained, but nothing predicts it")
            if longest is not None and len(segment) > longest:
                raise AlignmentError(f"{where}: a segment has {len(segment)} tokens, and the trainer takes {longest}")
            if not np.isfinite(segment.logprobs[segment.loss_mask]).all():
                raise AlignmentError(f"{where}: a trained token's log-prob is not finite")
            if (least := int(segment.token_ids.min())) < 0:
                raise AlignmentError(f"{where}: {least} is no token id")
            try:
                check_masks(segment, vocabulary)
                if experts is not None:
                    _check_experts(segment, experts, all_routed=all_routed)
            except AlignmentError as error:
                raise AlignmentError(f"{where}: {error.message}") from error
    return replace(group, rollouts=tuple(records))


def _check_experts(segment: Segment, experts: ExpertShape, *, all_routed: bool) -> None:
    experts.check(segment)
    if all_routed and (missing := experts.unrouted(segment)):
        raise AlignmentError(
            f"{missing} trained tokens have no recorded experts, and router.replay is required; "
            "let the policy record them (routed_experts = true)"
        )
