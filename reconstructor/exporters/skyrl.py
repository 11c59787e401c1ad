"""SkyRL's files: `skyrl-sft` for its SFT trainer's `pretokenized_dataset_paths`, `skyrl-rl` for its `PromptDataset`."""

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
    texts_behind,
)
from rolltap.reconstructor.exporters.verl import TaskPrompt


@dataclass(frozen=True, slots=True)
class SkyRlSft:
    """One row per segment with loss: its tokens, and a loss mask over all of them."""

    name: ClassVar[str] = "skyrl-sft"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {
            "input_ids": "list<int32>",
            "loss_mask": "list<int32>",
            **LABEL_TYPES,
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            if not item.rows:
                yield SkippedItem("no tokens that may be trained")
            for segment in item.rows:
                end = last_span(segment).end
                ids, mask = segment.token_ids[:end], segment.loss_mask[:end].astype(np.int32)
                texts = texts_behind(item, [turn.call_id for turn in segment.turns])
                yield Row({"input_ids": ids, "loss_mask": mask, **item.labels()}, content=(ids, mask), texts=texts)


@dataclass(frozen=True, slots=True)
class SkyRlRl:
    """One row per task: its opening messages, for new rollouts in the environment `env_class`."""

    env_class: str = "rolltap"
    data_source: str = "rolltap"

    name: ClassVar[str] = "skyrl-rl"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = False

    def schema(self) -> Mapping[str, str]:
        return {
            "data_source": "string",
            "prompt": "inferred",
            "env_class": "string",
            "reward_spec": "inferred",
            "extra_info": "inferred",
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        task = TaskPrompt.of(group)
        if isinstance(task, SkippedItem):
            yield task
            return
        values: dict[str, Any] = {
            "data_source": self.data_source,
            "prompt": task.messages,
            "env_class": self.env_class,
            "reward_spec": {"method": "rule", "ground_truth": task.truth},
            "extra_info": {"index": task.id, "task_id": task.id},
        }
        yield Row(values, content=(task.id, task.messages))
