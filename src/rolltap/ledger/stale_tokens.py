"""Masks the stale tokens of a leased group, for trainers that choose `stale = "mask"`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rolltap.ledger.version_history import VersionHistory
from rolltap.types import NO_VERSION, ROUTED_EXPERTS, Segment, Trajectory


def without_stale(trajectory: Trajectory, history: VersionHistory, max_staleness: int) -> Trajectory:
    """The trajectory with loss only on tokens of staleness `max_staleness` or less, and not of abandoned versions."""
    segments = tuple(_masked(segment, history, max_staleness) for segment in trajectory.segments)
    return replace(trajectory, segments=segments)


def _masked(segment: Segment, history: VersionHistory, max_staleness: int) -> Segment:
    versions = np.unique(segment.versions[segment.loss_mask]).tolist()
    stale = [version for version in versions if not history.is_fresh(version, max_staleness)]
    if not stale:
        return segment
    kept = segment.loss_mask & ~np.isin(segment.versions, stale)
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
