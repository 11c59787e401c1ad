"""What is on record of how trained tokens were drawn: at which temperature, and from which ids. Only numpy is needed.

A trainer computes log-probs of the distribution that was sampled: with top-p, top-k or min-p, over the ids that were
left ("keep sampling mask": DeepSeek-V3.2, arXiv 2512.02556, section 3.1). M are the trained tokens of some segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rolltap.errors import AlignmentError
from rolltap.types import Float32, Segment

TEMPERATURE = "temperature"
"""The extra array [L] of a segment with tokens that were sampled at another temperature than 1."""

SAMPLING_MASK = "sampling_mask"
"""The extra array [L, K] of a segment with tokens that were drawn from a part of the vocabulary: its ids, then -1."""


def temperatures(segments: Sequence[Segment]) -> Float32 | None:
    """[M]; None where all were sampled at 1. Calls that were sampled at 1 have none on record."""
    if not any(TEMPERATURE in segment.extras for segment in segments):
        return None
    values = [
        segment.extras.get(TEMPERATURE, np.ones(len(segment), np.float32))[segment.loss_mask] for segment in segments
    ]
    return np.nan_to_num(np.concatenate(values), nan=1.0).astype(np.float32)


def sampling_masks(segments: Sequence[Segment]) -> NDArray[np.int64] | None:
    """[M, K], only -1 for a token that was drawn from all ids; K is the length of the longest. None where all were."""
    tables = [_masks(segment) for segment in segments]
    width = max((int((table >= 0).sum(axis=1).max(initial=0)) for table in tables), default=0)
    if not width:
        return None
    wide = [np.pad(table, ((0, 0), (0, width)), constant_values=-1)[:, :width] for table in tables]
    return np.concatenate(wide).astype(np.int64)


def masked_tokens(segment: Segment) -> int:
    """How many trained tokens were drawn from a part of the vocabulary."""
    return int((_masks(segment) >= 0).any(axis=1).sum())


def check_masks(segment: Segment, vocabulary: int) -> None:
    """`AlignmentError` where a trained token's mask has ids out of the vocabulary, or not the token itself."""
    masks = _masks(segment)
    if masks.max(initial=-1) >= vocabulary:
        raise AlignmentError(f"a sampling mask has id {masks.max()}, of a vocabulary of {vocabulary}")
    sampled = segment.token_ids[segment.loss_mask]
    missing = (masks >= 0).any(axis=1) & ~(masks == sampled[:, None]).any(axis=1)
    if missing.any():
        raise AlignmentError(f"token {sampled[missing][0]} is not among the ids of its sampling mask")


def _masks(segment: Segment) -> NDArray[np.int32]:
    recorded = segment.extras.get(SAMPLING_MASK)
    return np.full((int(segment.loss_mask.sum()), 1), -1, np.int32) if recorded is None else recorded[segment.loss_mask]
