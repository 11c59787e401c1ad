"""verl's Parquet files: prompts for RL (`RLHFDataset`) and conversations for SFT (`MultiTurnSFTDataset`).

Both are rendered anew by verl. `tools` is a typed column there, so all tools of a file must fit one Parquet type;
where they don't, the export says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, Skipped
from rolltap.reconstructor.exporters.conversation import (
    ReasoningUse,
    content_text,
    conversations,
    one_of,
)


@dataclass(frozen=True, slots=True)
class VerlRl:
    """One row a task: its opening messages, to be sampled from again.

    `ground_truth` is the task's own where its spec has one, else the evaluator as JSON. `agent` names a verl agent
    loop (`agent_name`).
    """

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

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | Skipped]:
        found = next(((item, each) for item in group for each in conversations(item) if not each.agent), None)
        if found is None:
            yield Skipped("no conversation that may be trained")
            return
        item, conversation = found
        messages = conversation.messages()
        prompt = [{"role": m["role"], "content": content_text(m)} for m in messages[: conversation.opening]]
        spec: Mapping[str, Any] = item.task.spec if item.task is not None else {}
        truth = spec.get("ground_truth", spec.get("evaluator", ""))
        values: dict[str, Any] = {
            "data_source": self.data_source,
            "prompt": prompt,
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": truth if isinstance(truth, str) else json.dumps(truth)},
            "extra_info": {"index": item.task_id, "task_id": item.task_id, "split": ""},
        }
        if self.agent:
            values["agent_name"] = self.agent
        yield Row(values, content=(item.task_id, prompt))


@dataclass(frozen=True, slots=True)
class VerlSft:
    """One row a conversation; `enable_thinking` where it has reasoning."""

    reasoning: ReasoningUse = "keep"

    name: ClassVar[str] = "verl-sft"
    containers: ClassVar[tuple[Container, ...]] = ("parquet",)
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("reasoning", self.reasoning, ("keep", "drop"))

    def schema(self) -> Mapping[str, str]:
        return {"messages": "messages", "tools": "inferred", "enable_thinking": "bool", "session_id": "string"}

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | Skipped]:
        for item in group:
            for conversation in conversations(item):
                messages = conversation.messages(self.reasoning)
                thinking = any(message.get("reasoning_content") for message in messages)
                tools = list(conversation.tools) or None
                values = {
                    "messages": messages,
                    "tools": tools,
                    "enable_thinking": thinking,
                    "session_id": item.session.id,
                }
                yield Row(values, content=(messages, tools), rendered=conversation.rendered())
