"""Supervised fine-tuning on conversations: `messages` and `tools`, as TRL, Axolotl and others read them.

`tools` is a JSON text (TRL decodes it). A tool call's arguments are an object where they are JSON. The trainer renders
the conversation by its chat template, so its tokens need not be the sampled ones; `sft-tokens` holds those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, Skipped
from rolltap.reconstructor.exporters.text import ReasoningUse, conversations, one_of, tools_text, with_reasoning


@dataclass(frozen=True, slots=True)
class Sft:
    """One row a conversation. `reasoning` is kept (as `reasoning_content`) or dropped."""

    reasoning: ReasoningUse = "keep"

    name: ClassVar[str] = "sft"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("reasoning", self.reasoning, ("keep", "drop"))

    def schema(self) -> Mapping[str, str]:
        return {
            "messages": "messages",
            "tools": "string",
            "session_id": "string",
            "rollout_id": "string",
            "group_id": "string",
            "task_id": "string",
            "reward": "float64",
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | Skipped]:
        for item in group:
            found = list(conversations(item))
            if not found:
                yield Skipped("no conversation that may be trained")
            for conversation in found:
                messages = with_reasoning(conversation.text.conversation, self.reasoning)
                tools = tools_text(conversation.text.tools)
                values = {"messages": messages, "tools": tools, **item.labels()}
                yield Row(values, content=(messages, tools), rendered=conversation.rendered())
