"""Takes the loss off tokens of a leased group that its trainer must not train."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from rolltap.ledger.version_history import VersionHistory
from rolltap.types import NO_VERSION, ROUTED_EXPERTS, Segment, Trajectory

LATE = "late"
"""The mask reason of a call that came to the store after its rollout's end was settled."""


def without_stale(trajectory: Trajectory, history: VersionHistory, max_staleness: int) -> Trajectory:
    """The trajectory with loss only on tokens of staleness `max_staleness` or less, and not of abandoned versions."""
    segments = tuple(_only_fresh(segment, history, max_staleness) for segment in trajectory.segments)
    return replace(trajectory, segments=segments)


def without_late_calls(trajectory: Trajectory, known: Collection[str]) -> Trajectory:
    """The trajectory with loss only on the calls in `known`: those that were recorded when their rollout was scored."""
    late = {
        turn.call_id: turn.end - turn.start
        for segment in trajectory.segments
        for turn in segment.turns
        if turn.trained and turn.call_id not in known
    }
    if not late:
        return trajectory
    segments = tuple(_only_known(segment, known) for segment in trajectory.segments)
    counts = dict(trajectory.counts)
    counts["trained_calls"] = counts.get("trained_calls", 0) - len(late)
    counts["trained_tokens"] = sum(int(segment.loss_mask.sum()) for segment in segments)
    counts["masked_calls.late"] = len(late)
    counts["masked_tokens.late"] = sum(late.values())
    classifications = tuple(
        replace(one, mask=LATE) if one.call_id in late else one for one in trajectory.classifications
    )
    return replace(trajectory, segments=segments, counts=counts, classifications=classifications)


def _only_fresh(segment: Segment, history: VersionHistory, max_staleness: int) -> Segment:
    versions = np.unique(segment.versions[segment.loss_mask]).tolist()
    stale = [version for version in versions if not history.is_fresh(version, max_staleness)]
    return _masked(segment, np.isin(segment.versions, stale)) if stale else segment


def _only_known(segment: Segment, known: Collection[str]) -> Segment:
    late = [turn for turn in segment.turns if turn.trained and turn.call_id not in known]
    if not late:
        return segment
    masked = np.zeros(len(segment), dtype=bool)
    for turn in late:
        masked[turn.start : turn.end] = True
    return _masked(segment, masked)


def _masked(segment: Segment, masked: np.ndarray) -> Segment:
    """The segment without loss on the tokens in `masked`, a boolean [L]."""
    kept = segment.loss_mask & ~masked
    return replace(
        segment,
        loss_mask=kept,
        logprobs=np.where(kept, segment.logprobs, np.float32(0)),
        versions=np.where(kept, segment.versions, np.int32(NO_VERSION)),
        turns=tuple(replace(turn, trained=bool(kept[turn.start : turn.end].any())) for turn in segment.turns),
        extras={  # routed experts are kept, as they are needed for context tokens as well
            name: array if name == ROUTED_EXPERTS else _cleared(array, ~kept) for name, array in segment.extras.items()
        },
    )


def _cleared(array: np.ndarray, where: np.ndarray) -> np.ndarray:
    cleared = array.copy()
    cleared[where] = 0
    return cleared
