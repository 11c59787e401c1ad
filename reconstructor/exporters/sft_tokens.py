"""Supervised fine-tuning on the sampled tokens: `input_ids` and `labels`, which are -100 for tokens without loss.

TRL reads it with `dataset_kwargs={"skip_prepare_dataset": True}`; nothing is rendered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rolltap.reconstructor.exporters.base import (
    LABEL_TYPES,
    Container,
    ExportItem,
    Row,
    SkippedItem,
    last_span,
    texts_behind,
)

IGNORED = -100


@dataclass(frozen=True, slots=True)
class SftTokens:
    """One row per segment with loss."""

    name: ClassVar[str] = "sft-tokens"
    containers: ClassVar[tuple[Container, ...]] = ("parquet", "jsonl")
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {
            "input_ids": "list<int32>",
            "labels": "list<int32>",
            **LABEL_TYPES,
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            if not item.rows:
                yield SkippedItem("no tokens that may be trained")
            for segment in item.rows:
                end = last_span(segment).end
                ids = segment.token_ids[:end]
                labels = np.where(segment.loss_mask[:end], ids, IGNORED).astype(np.int32)
                texts = texts_behind(item, [turn.call_id for turn in segment.turns])
                yield Row({"input_ids": ids, "labels": labels, **item.labels()}, content=(ids, labels), texts=texts)
