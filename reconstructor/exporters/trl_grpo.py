"""The return values of a `rollout_func` of TRL's `GRPOTrainer`: one row per rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rolltap.reconstructor.exporters.base import (
    LABEL_TYPES,
    Container,
    ExportItem,
    Row,
    SkippedItem,
    last_span,
    only_segment,
    texts_behind,
)


@dataclass(frozen=True, slots=True)
class TrlGrpo:
    """The completion begins with the first sampled token. `env_mask` is 1 for a trained token. `logprobs` are the
    engine's for trained tokens, and 0 for others."""

    name: ClassVar[str] = "trl-grpo"
    containers: ClassVar[tuple[Container, ...]] = ("parquet", "jsonl")
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {
            "prompt_ids": "list<int32>",
            "completion_ids": "list<int32>",
            "env_mask": "list<int32>",
            "logprobs": "list<float32>",
            **LABEL_TYPES,
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            segment = only_segment(item)
            if isinstance(segment, SkippedItem):
                yield segment
                continue
            if item.reward is None:
                yield SkippedItem("no reward")
                continue
            start, end = segment.prompt_length, last_span(segment).end
            values: dict[str, Any] = {
                "prompt_ids": segment.token_ids[:start],
                "completion_ids": segment.token_ids[start:end],
                "env_mask": segment.loss_mask[start:end].astype(np.int32),
                "logprobs": segment.logprobs[start:end],
                **item.labels(),
            }
            yield Row(values, texts=texts_behind(item, [turn.call_id for turn in segment.turns]))
