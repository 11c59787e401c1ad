"""Desirable and undesirable completions: `prompt`, `completion`, `label`, as TRL's KTO reads them.

`label` says whether the rollout's reward is above `threshold`. No pairs are needed, so every rollout with a reward and
one main conversation has a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, Skipped
from rolltap.reconstructor.exporters.conversation import ReasoningUse, one_of, rewarded, tools_text


@dataclass(frozen=True, slots=True)
class Kto:
    """One row a rollout."""

    threshold: float = 0.0
    reasoning: ReasoningUse = "keep"

    name: ClassVar[str] = "kto"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("reasoning", self.reasoning, ("keep", "drop"))

    def schema(self) -> Mapping[str, str]:
        return {
            "prompt": "messages",
            "completion": "messages",
            "label": "bool",
            "tools": "string",
            "session_id": "string",
            "rollout_id": "string",
            "group_id": "string",
            "task_id": "string",
            "reward": "float64",
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | Skipped]:
        for item in group:
            found = rewarded(item)
            if isinstance(found, Skipped):
                yield found
            else:
                reward, conversation = found
                messages = conversation.messages(self.reasoning)
                values = {
                    "prompt": messages[: conversation.opening],
                    "completion": messages[conversation.opening :],
                    "label": reward > self.threshold,
                    "tools": tools_text(conversation.tools),
                    **item.labels(),
                }
                content = [values[name] for name in ("prompt", "completion", "label", "tools")]
                yield Row(values, content=content, rendered=conversation.rendered())
