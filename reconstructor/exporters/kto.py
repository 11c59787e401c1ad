"""Desirable and undesirable completions: `prompt`, `completion`, `label`, as TRL's KTO reads them.

`label` says whether the rollout's reward is above `threshold`. No pairs are needed, so every rollout with a reward and
one main conversation has a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, Skipped
from rolltap.reconstructor.exporters.text import (
    ReasoningUse,
    one_of,
    opening,
    rewarded,
    tools_text,
    with_reasoning,
)


@dataclass(frozen=True, slots=True)
class Kto:
    """One row a rollout."""

    threshold: float = 0.0
    reasoning: ReasoningUse = "keep"

    name: ClassVar[str] = "kto"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = False

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
                prompt = list(opening(item, conversation))
                completion = conversation.text.conversation[len(prompt) :]
                values = {
                    "prompt": with_reasoning(prompt, self.reasoning),
                    "completion": with_reasoning(completion, self.reasoning),
                    "label": reward > self.threshold,
                    "tools": tools_text(conversation.text.tools),
                    **item.labels(),
                }
                content = [values[name] for name in ("prompt", "completion", "label", "tools")]
                yield Row(values, content=content, rendered=conversation.rendered())
