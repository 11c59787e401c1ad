"""What the record holds of trained tokens: their sampling, and the experts of a mixture. Needs only numpy.

A trainer computes log-probs of the distribution that was sampled: at the call's temperature and, with top-p, top-k,
min-p or a grammar, over the ids that remained ("keep sampling mask": DeepSeek-V3.2, arXiv 2512.02556, section 3.1). M
are the trained tokens of some segments. A mixture's recorded experts must exist in the model that replays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rolltap.errors import AlignmentError
from rolltap.token_masks import FREE, MASK_ROWS, MASK_TABLE, SAMPLING_MASK, Int32, ids_of, joined
from rolltap.types import ROUTED_EXPERTS, Float32, Segment

TEMPERATURE = "temperature"
"""Name of a segment's extra array [L] with the sampling temperatures, if some are not 1."""


def temperatures(segments: Sequence[Segment]) -> Float32 | None:
    """The sampling temperatures [M]; None if all are 1. Calls sampled at temperature 1 have none on record."""
    if not any(TEMPERATURE in segment.extras for segment in segments):
        return None
    values = [
        segment.extras.get(TEMPERATURE, np.ones(len(segment), np.float32))[segment.loss_mask] for segment in segments
    ]
    return np.nan_to_num(np.concatenate(values), nan=1.0).astype(np.float32)


def sampling_masks(segments: Sequence[Segment]) -> NDArray[np.int64] | None:
    """The sampling masks [M, K], K the longest; only -1: drawn from all ids. None if every token was."""
    tables = [_masks(segment) for segment in segments]
    width = max((int((table >= 0).sum(axis=1).max(initial=0)) for table in tables), default=0)
    if not width:
        return None
    wide = [np.pad(table, ((0, 0), (0, width)), constant_values=-1)[:, :width] for table in tables]
    return np.concatenate(wide).astype(np.int64)


def grammar_masks(segments: Sequence[Segment]) -> tuple[NDArray[np.int64], Int32] | None:
    """The rows [M] of the sampling masks that grammars left, and their table (`token_masks`); None if none did."""
    parts = [(_rows(segment), segment.extras.get(MASK_TABLE, np.empty(0, np.int32))) for segment in segments]
    rows, table = joined(parts)
    return (rows.astype(np.int64), table) if (rows != FREE).any() else None


def masked_tokens(segment: Segment) -> int:
    """The number of trained tokens with a sampling mask."""
    return int(((_masks(segment) >= 0).any(axis=1) | (_rows(segment) != FREE)).sum())


def check_masks(segment: Segment, vocabulary: int) -> None:
    """`AlignmentError` if a trained token's mask has ids outside the vocabulary, or lacks the token itself."""
    masks = _masks(segment)
    if masks.max(initial=-1) >= vocabulary:
        raise AlignmentError(f"a sampling mask has id {masks.max()}, of a vocabulary of {vocabulary}")
    sampled = segment.token_ids[segment.loss_mask]
    missing = (masks >= 0).any(axis=1) & ~(masks == sampled[:, None]).any(axis=1)
    if missing.any():
        raise AlignmentError(f"token {sampled[missing][0]} is not among the ids of its sampling mask")
    table = segment.extras.get(MASK_TABLE, np.empty(0, np.int32))
    rows = _rows(segment)
    for row in np.unique(rows):
        try:
            ids = ids_of(int(row), table)
        except (IndexError, ValueError) as error:
            raise AlignmentError(f"a sampling mask is missing in its table: {error}") from error
        if ids is not None and (not len(ids) or ids[-1] >= vocabulary):
            raise AlignmentError(f"a sampling mask has ids up to {ids[-1:]}, of a vocabulary of {vocabulary}")
        if ids is not None and (outside := np.setdiff1d(sampled[rows == row], ids)).size:
            raise AlignmentError(f"token {outside[0]} is not among the ids of its sampling mask")


def _rows(segment: Segment) -> Int32:
    recorded = segment.extras.get(MASK_ROWS)
    return np.full(int(segment.loss_mask.sum()), FREE, np.int32) if recorded is None else recorded[segment.loss_mask]


def _masks(segment: Segment) -> NDArray[np.int32]:
    recorded = segment.extras.get(SAMPLING_MASK)
    return np.full((int(segment.loss_mask.sum()), 1), -1, np.int32) if recorded is None else recorded[segment.loss_mask]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture's shape: `depth` decoder layers, `layers` with experts, `experts` in each, `top_k` chosen per token."""

    depth: int
    layers: tuple[int, ...]
    experts: int
    top_k: int

    def columns(self, width: int) -> Sequence[int]:
        """The recorded layer of each of the model's expert blocks, if a token has `width` recorded experts.

        Engines record every decoder layer, or only those with experts. `AlignmentError` for any other width.
        """
        layers, rest = divmod(width, self.top_k)
        if rest == 0 and layers == self.depth:
            return self.layers
        if rest == 0 and layers == len(self.layers):
            return range(layers)
        raise AlignmentError(
            f"{width} experts are recorded for a token; the model has {self.top_k} in each of {len(self.layers)} "
            f"layers of experts, {self.depth} layers in all"
        )

    def check(self, segment: Segment) -> None:
        """`AlignmentError` if a trained token's recorded experts, or any recorded expert, can't be this model's."""
        recorded = segment.extras.get(ROUTED_EXPERTS)
        if recorded is None:
            return
        table = recorded.reshape(len(segment), -1)
        columns = self.columns(table.shape[1])
        replayed = table.reshape(len(segment), -1, self.top_k)[:, list(columns)]
        if (replayed >= self.experts).any():  # context tokens, too: an index out of bounds kills a GPU process
            raise AlignmentError(f"the experts recorded for a token are not {self.top_k} of {self.experts}")
        trained = replayed[segment.loss_mask]
        is_whole = (trained >= 0).all(axis=(1, 2))
        if ((trained >= 0).any(axis=(1, 2)) != is_whole).any():
            raise AlignmentError(f"the experts recorded for a trained token are not {self.top_k} of {self.experts}")
        ordered = np.sort(trained[is_whole], axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise AlignmentError("an expert is recorded twice for one layer of a trained token")

    def unrouted(self, segment: Segment) -> int:
        """The number of trained tokens without recorded experts."""
        recorded = segment.extras.get(ROUTED_EXPERTS)
        if recorded is None:
            return int(segment.loss_mask.sum())
        return int((recorded.reshape(len(segment), -1)[segment.loss_mask] < 0).any(axis=1).sum())
