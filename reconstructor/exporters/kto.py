"""Desirable and undesirable completions: `prompt`, `completion`, `label`, as TRL's KTO reads them.

`label` is true if the rollout's reward is above `threshold`. KTO needs no pairs, so every rollout with a reward and one
main conversation has a row, except completions of a group that its rollouts label differently: a flaky reward.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rolltap.reconstructor.exporters.base import LABEL_TYPES, Container, ExportItem, Row, SkippedItem
from rolltap.reconstructor.exporters.conversation import MessageForm, rewarded, tools_text


@dataclass(frozen=True, slots=True)
class Kto(MessageForm):
    """One row per rollout."""

    threshold: float = 0.0

    name: ClassVar[str] = "kto"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {
            "prompt": self.column,
            "completion": self.column,
            "label": "bool",
            "tools": "string",
            **LABEL_TYPES,
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        rows: list[Row] = []
        labels: defaultdict[str, set[bool]] = defaultdict(set)
        for item in group:
            outcome = rewarded(item)
            if isinstance(outcome, SkippedItem):
                yield outcome
                continue
            reward, conversation = outcome
            messages = conversation.messages(self)
            values = {
                "prompt": messages[: conversation.opening],
                "completion": messages[conversation.opening :],
                "label": reward > self.threshold,
                "tools": tools_text(conversation.tools),
                **item.labels(),
            }
            content = [values[name] for name in ("prompt", "completion", "label", "tools")]
            rows.append(Row(values, content=content, rendered=conversation.rendered()))
            labels[_completion(rows[-1])].add(values["label"])
        for row in rows:
            if len(labels[_completion(row)]) > 1:
                yield SkippedItem("completion with both labels")
            else:
                yield row


def _completion(row: Row) -> str:
    """What a label is of, to find its other rows."""
    return json.dumps([row.values[name] for name in ("prompt", "completion", "tools")], sort_keys=True)
