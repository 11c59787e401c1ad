"""Supervised fine-tuning: `sft` on conversations, as TRL, Axolotl and others read them, `sft-tokens` on sampled tokens.

`sft` has `messages` and `tools`. `tools` is a JSON text (TRL decodes it). A tool call's arguments are an object if they
are JSON. The trainer renders the conversation with its chat template, so its tokens may differ from the sampled ones.

Each assistant message has a `weight`: 1 if this row trains it, 0 for context. For a trainer that ignores weights (TRL)
use `targets=split`, with a `prompt` and a `completion` per trained reply, or `targets=whole`, with only the
conversations in which every reply is trained. With `mark=loss` it is called `loss` and true or false (ms-swift).

With `images=column` a row has `images`, files that Parquet has as `datasets`' `Image` and JSON Lines as data URLs, as
TRL reads them for models that see. It reads no dataset with that column for others, so it is not the default.

`sft-tokens` has `input_ids` and `labels`, which are -100 for tokens without loss. TRL reads it with
`dataset_kwargs={"skip_prepare_dataset": True}`; nothing is rendered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar, Literal

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
from rolltap.reconstructor.exporters.conversation import (
    SHOWS_IMAGES,
    UNTRAINED,
    Conversation,
    ImageUse,
    MessageForm,
    Targets,
    counted_conversations,
    one_of,
    tools_text,
)


@dataclass(frozen=True, slots=True)
class Sft(MessageForm):
    """One row per conversation, or one per reply."""

    targets: Targets = "weight"
    mark: Literal["weight", "loss"] = "weight"

    name: ClassVar[str] = "sft"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    image_uses: ClassVar[tuple[ImageUse, ...]] = ("skip", "parts", "column")
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        MessageForm.__post_init__(self)
        one_of("targets", self.targets, ("whole", "split", "weight"))
        one_of("mark", self.mark, ("weight", "loss"))

    def schema(self) -> Mapping[str, str]:
        texts = ("prompt", "completion") if self.targets == "split" else ("messages",)
        return {
            **dict.fromkeys(texts, self.column),
            **({"images": "list<image>"} if self.images == "column" else {}),
            "tools": "string",
            **LABEL_TYPES,
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            for conversation in counted_conversations(item):
                if isinstance(conversation, SkippedItem):
                    yield conversation
                elif self.images == "skip" and conversation.image_urls:
                    yield SHOWS_IMAGES
                else:
                    yield from self._rows(item, conversation)

    def _rows(self, item: ExportItem, conversation: Conversation) -> Iterable[Row | SkippedItem]:
        tools, split = tools_text(conversation.tools), self.targets == "split"
        files = conversation.image_files() if self.images == "column" else []
        if isinstance(files, SkippedItem):
            yield files
            return
        rows = conversation.targets(self.targets, self)
        if not rows:
            yield UNTRAINED
        for messages in rows:
            if self.mark == "loss":
                messages = [_with_loss(message) for message in messages]
            text = {"prompt": messages[:-1], "completion": messages[-1:]} if split else {"messages": messages}
            shown = files[: _placeholders(messages)]
            digests = [sha256(file).hexdigest() for file in shown]
            values = {**text, "tools": tools, **item.labels()}
            if self.images == "column":
                values["images"] = shown
            rendered = None if split else conversation.rendered()
            yield Row(values, content=(text, tools, *digests), rendered=rendered)


def _placeholders(messages: Sequence[Mapping[str, Any]]) -> int:
    parts = (part for message in messages if not isinstance(message["content"], str) for part in message["content"])
    return sum(part["type"] == "image" for part in parts)


def _with_loss(message: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {key: value for key, value in message.items() if key != "weight"}
    return {**renamed, "loss": bool(message["weight"])} if "weight" in message else renamed


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
