"""Rewards as preferences: pairs for TRL's DPO, and single labelled completions for its KTO.

`preference` has `prompt`, `chosen`, `rejected`. The rollouts of a group that have a reward and one main conversation
are ranked. The best is paired with the worst, the second best with the second worst, and so on. A pair is used if its
rewards differ by more than `margin`, and no rollout is used twice. A pair whose sides are equal is skipped, and one
whose opposite is in the group; the opposite of another group's is skipped where it comes later. Both sides must have
the same opening, apart from clocks, paths and other volatile text (`begin_alike`); the prompt is the better one's. A
completion is the whole rest of the conversation, including tool results.

`kto` has `prompt`, `completion`, `label`. The label is true if the rollout's reward is above `threshold`. No pairs are
needed, so every rollout with a reward and one main conversation has a row, except completions of a group that its
rollouts label differently: a flaky reward. Of groups that label it differently, the first has the row.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import LABEL_TYPES, Container, ExportItem, Row, SkippedItem
from rolltap.reconstructor.exporters.conversation import (
    Conversation,
    MessageForm,
    begin_alike,
    rewarded,
    tools_text,
)


@dataclass(frozen=True, slots=True)
class Preference(MessageForm):
    """Pairs whose rewards differ by more than `margin`."""

    margin: float = 0.0

    name: ClassVar[str] = "preference"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        MessageForm.__post_init__(self)
        if not 0 <= self.margin < math.inf:  # below 0, or as NaN, pairs of equal rewards would be preferences
            raise DatasetError(f"--option margin: expected a finite number, 0 or more, not {self.margin}")

    def schema(self) -> Mapping[str, str]:
        return {
            "prompt": self.column,
            "chosen": self.column,
            "rejected": self.column,
            "tools": "string",
            "reward_chosen": "float64",
            "reward_rejected": "float64",
            "rollout_chosen": "string",
            "rollout_rejected": "string",
            "session_chosen": "string",
            "session_rejected": "string",
            "group_id": "string",
            "task_id": "string",
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        if group[0].group_id is None:
            yield SkippedItem("belongs to no group (--group-by)")
            return
        ranked: list[tuple[float, str, ExportItem, Conversation]] = []
        for item in group:
            outcome = rewarded(item, self.images)
            if isinstance(outcome, SkippedItem):
                yield outcome
            else:
                reward, conversation = outcome
                said = json.dumps(self._completion(conversation), sort_keys=True)  # pairs don't follow from ids
                ranked.append((reward, said, item, conversation))
        ranked.sort(key=lambda entry: (-entry[0], entry[1]))
        pairs = list(zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False))
        opposites = {(worse[1], better[1]) for better, worse in pairs if better[0] - worse[0] > self.margin}
        for better, worse in pairs:
            if better[0] - worse[0] <= self.margin:
                yield SkippedItem("pair whose rewards don't differ by more than the margin")
            elif not begin_alike(better[2:], worse[2:]):
                yield SkippedItem("pair that doesn't begin alike")
            elif better[1] == worse[1]:
                yield SkippedItem("pair whose sides are equal")
            elif (better[1], worse[1]) in opposites:
                yield SkippedItem("pair whose opposite is there too")
            else:
                yield self._pair(better, worse)

    def _prompt(self, conversation: Conversation) -> list[dict[str, Any]]:
        return conversation.messages(self)[: conversation.opening]

    def _completion(self, conversation: Conversation) -> list[dict[str, Any]]:
        return conversation.messages(self)[conversation.opening :]

    def _pair(
        self, better: tuple[float, str, ExportItem, Conversation], worse: tuple[float, str, ExportItem, Conversation]
    ) -> Row:
        values: dict[str, Any] = {"prompt": self._prompt(better[3])}
        for side, (reward, _, item, conversation) in (("chosen", better), ("rejected", worse)):
            values[side] = self._completion(conversation)
            values[f"reward_{side}"] = reward
            values[f"rollout_{side}"] = item.rollout.id if item.rollout else None
            values[f"session_{side}"] = item.session.id
        sides = sorted(((better[1], "chosen"), (worse[1], "rejected")))  # the opposite pair has the same content
        values["tools"] = tools_text(better[3].tools)
        values |= {name: better[2].labels()[name] for name in ("group_id", "task_id")}
        return Row(
            values,
            content=[values["prompt"], *(values[side] for _, side in sides), values["tools"]],
            claim=sides[0][1],
            rendered=better[3].rendered(),
        )


@dataclass(frozen=True, slots=True)
class Kto(MessageForm):
    """One row per rollout."""

    threshold: float = 0.0

    name: ClassVar[str] = "kto"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl", "parquet")
    faithful: ClassVar[bool] = False
    for_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        MessageForm.__post_init__(self)
        if not math.isfinite(self.threshold):
            raise DatasetError(f"--option threshold: expected a finite number, not {self.threshold}")

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
            outcome = rewarded(item, self.images)
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
            content = [values[name] for name in ("prompt", "completion", "tools")]
            rows.append(Row(values, content=content, claim=values["label"], rendered=conversation.rendered()))
            labels[_completion(rows[-1])].add(values["label"])
        for row in rows:
            if len(labels[_completion(row)]) > 1:
                yield SkippedItem("completion with both labels")
            else:
                yield row


def _completion(row: Row) -> str:
    """What a label is of, to find its other rows."""
    return json.dumps([row.values[name] for name in ("prompt", "completion", "tools")], sort_keys=True)
