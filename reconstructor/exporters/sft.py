"""Supervised fine-tuning on conversations: `messages` and `tools`, as TRL, Axolotl and others read them.

`tools` is a JSON text (TRL decodes it). A tool call's arguments are an object where they are JSON. The trainer renders
the conversation by its chat template, so its tokens need not be the sampled ones; `sft-tokens` holds those.

Each assistant message has a `weight`: 1 where this row trains it, 0 for context. A trainer that reads no weights (TRL)
takes `targets=split`: a `prompt` and a `completion` for each reply that is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, Skipped
from rolltap.reconstructor.exporters.conversation import (
    Conversation,
    ReasoningUse,
    conversations,
    one_of,
    tools_text,
)


@dataclass(frozen=True, slots=True)
class Sft:
    """One row a conversation, or one a reply. `reasoning` is kept (as `reasoning_content`) or dropped."""

    reasoning: ReasoningUse = "keep"
    targets: Literal["weight", "split"] = "weight"

    name: ClassVar[str] = "sft"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("reasoning", self.reasoning, ("keep", "drop"))
        one_of("targets", self.targets, ("weight", "split"))

    def schema(self) -> Mapping[str, str]:
        texts = ("messages",) if self.targets == "weight" else ("prompt", "completion")
        return {
            **dict.fromkeys(texts, "messages"),
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
                tools = tools_text(conversation.tools)
                for text in self._texts(conversation):
                    rendered = conversation.rendered() if self.targets == "weight" else None
                    yield Row({**text, "tools": tools, **item.labels()}, content=(text, tools), rendered=rendered)

    def _texts(self, conversation: Conversation) -> Iterable[dict[str, Any]]:
        if self.targets == "weight":
            yield {"messages": conversation.weighted(self.reasoning)}
            return
        messages = conversation.messages(self.reasoning)
        for index, each in enumerate(conversation.recorded):
            if each.train:
                yield {"prompt": messages[:index], "completion": [messages[index]]}
