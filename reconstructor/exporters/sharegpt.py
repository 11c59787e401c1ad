"""ShareGPT, as LLaMA-Factory and others read it: `conversations` of `from` and `value`, `system`, `tools`.

Turns alternate: `human` or `observation`, then `gpt` or `function_call`. Parallel calls are a JSON list in one
`function_call`, their results a JSON list in one `observation`. Reasoning comes first, in `<think>`. If a reply has
text and calls, the text comes before the calls, which are then in `<tool_call>`: LLaMA-Factory keeps such text.

LLaMA-Factory ignores weights: it trains every turn of the model, or with `mask_history` only the last one. So `targets`
is `whole` (conversations in which every reply is trained) or `split` (one row per reply, for `mask_history`). With
`weight`, for other readers, each turn of the model has a `weight` of 1 or 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from rolltap.reconstructor.exporters.base import Container, ExportItem, Message, Row, SkippedItem
from rolltap.reconstructor.exporters.conversation import (
    SHOWS_IMAGES,
    UNTRAINED,
    Conversation,
    MessageForm,
    ReasoningUse,
    Targets,
    content_text,
    counted_conversations,
    one_of,
)

OURS = ("gpt", "function_call")


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """One row per conversation, or one per reply."""

    reasoning: ReasoningUse = "keep"
    targets: Targets = "whole"

    name: ClassVar[str] = "sharegpt"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl",)
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("targets", self.targets, ("whole", "split", "weight"))

    def schema(self) -> Mapping[str, str]:
        return {}

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            for conversation in counted_conversations(item):
                if isinstance(conversation, SkippedItem):
                    yield conversation
                    continue
                if conversation.image_urls:
                    yield SHOWS_IMAGES
                    continue
                rows = conversation.targets(self.targets, MessageForm(self.reasoning))
                yield from (self._row(item, conversation, messages) for messages in rows)
                if not rows:
                    yield UNTRAINED

    def _row(self, item: ExportItem, conversation: Conversation, messages: Sequence[Message]) -> Row | SkippedItem:
        turns = share_gpt_turns(messages)
        if not alternates(turns):
            return SkippedItem("turns don't alternate")
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        if any(message["role"] == "system" for message in messages[len(leading) :]):
            return SkippedItem("a system message in mid-conversation")
        system = "\n\n".join(content_text(message) for message in leading)
        tools = json.dumps([tool["function"] for tool in conversation.tools], ensure_ascii=False)
        values = {"conversations": turns, "system": system, "tools": tools, **item.labels()}
        rendered = None if self.targets == "split" else conversation.rendered()
        return Row(values, content=(turns, system, tools), rendered=rendered)


def share_gpt_turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as turns, without system messages. Consecutive user messages or tool results are joined."""
    turns: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(content_text(message))
            continue
        if results:
            turns.append(_observation(results))
            results = []
        if message["role"] == "assistant":
            turns.append(_assistant(message))
        elif message["role"] == "user" and turns and turns[-1]["from"] == "human":
            turns[-1]["value"] += "\n\n" + content_text(message)
        elif message["role"] == "user":
            turns.append({"from": "human", "value": content_text(message)})
    return [*turns, *([_observation(results)] if results else [])]


def alternates(turns: Sequence[Mapping[str, Any]]) -> bool:
    """True if the turns alternate between human or tool and model, and end with the model."""
    return (
        bool(turns) and len(turns) % 2 == 0 and all((turn["from"] in OURS) == (i % 2) for i, turn in enumerate(turns))
    )


def _observation(results: Sequence[str]) -> dict[str, Any]:
    value = results[0] if len(results) == 1 else json.dumps(list(results), ensure_ascii=False)
    return {"from": "observation", "value": value}


def _assistant(message: Message) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
    ]
    text = content_text(message)
    weight = {"weight": message["weight"]} if "weight" in message else {}
    if not calls:
        return {"from": "gpt", "value": thought + text, **weight}
    value = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
    value = f"{text}\n<tool_call>{value}</tool_call>" if text.strip() else value
    return {"from": "function_call", "value": thought + value, **weight}
