"""verl's Parquet files for RL (`RLHFDataset`): prompts, which verl renders again.

For SFT, `rolltap.trainer_client.adapters.verl_sft` reads `sft-tokens` and `sft`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, SkippedItem
from rolltap.reconstructor.exporters.conversation import SHOWS_IMAGES, content_text, conversations, image_urls


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """A task's opening messages as texts. `truth`, for the judgement of its answer: its spec's `ground_truth`, else its
    evaluator as JSON."""

    id: str
    messages: list[dict[str, str]]
    truth: str

    @classmethod
    def of(cls, group: Sequence[ExportItem]) -> TaskPrompt | SkippedItem:
        """The prompt of the group's first conversation that may be trained, or why there is none."""
        first = next(((item, each) for item in group for each in conversations(item) if not each.agent), None)
        if first is None:
            return SkippedItem("no conversation that may be trained")
        item, conversation = first
        opening = conversation.messages()[: conversation.opening]
        if any(map(image_urls, opening)):
            return SHOWS_IMAGES
        spec: Mapping[str, Any] = item.task.spec if item.task is not None else {}
        truth = spec.get("ground_truth", spec.get("evaluator", ""))
        messages = [{"role": message["role"], "content": content_text(message)} for message in opening]
        return cls(item.task_id, messages, truth if isinstance(truth, str) else json.dumps(truth))


@dataclass(frozen=True, slots=True)
class VerlRl:
    """One row per task, for new rollouts. `agent` names a verl agent loop (`agent_name`)."""

    data_source: str = "rolltap"
    ability: str = "agent"
    agent: str = ""

    name: ClassVar[str] = "verl-rl"
    containers: ClassVar[tuple[Container, ...]] = ("parquet",)
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = False

    def schema(self) -> Mapping[str, str]:
        columns = {
            "data_source": "string",
            "prompt": "inferred",
            "ability": "string",
            "reward_model": "inferred",
            "extra_info": "inferred",
        }
        return columns | ({"agent_name": "string"} if self.agent else {})

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        task = TaskPrompt.of(group)
        if isinstance(task, SkippedItem):
            yield task
            return
        values: dict[str, Any] = {
            "data_source": self.data_source,
            "prompt": task.messages,
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": task.truth},
            "extra_info": {"index": task.id, "task_id": task.id, "split": ""},
        }
        if self.agent:
            values["agent_name"] = self.agent
        yield Row(values, content=(task.id, task.messages))
