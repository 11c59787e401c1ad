"""Harbor's rollout details: per turn the prompt's ids, the completion's ids and their log-probabilities.

One row per session. `rollout_details` has one Harbor `RolloutDetail` per segment with loss, the main agent's first.
A turn is listed only in the segment that trains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, SkippedItem, texts_behind, trained_spans
from rolltap.reconstructor.exporters.transitions import versions_of
from rolltap.types import Segment


@dataclass(frozen=True, slots=True)
class Harbor:
    """One row per session; see the module's docstring."""

    name: ClassVar[str] = "harbor"
    containers: ClassVar[tuple[Container, ...]] = ("jsonl",)
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {}

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            rows = [segment for segment in item.rows if trained_spans(segment)]
            segments = sorted(rows, key=lambda segment: segment.agent != "")
            if not segments:
                yield SkippedItem("no tokens that may be trained")
                continue
            texts = texts_behind(item, [turn.call_id for segment in segments for turn in segment.turns])
            details = [rollout_detail(item, segment) for segment in segments]
            yield Row({**item.labels(), "rollout_details": details}, texts=texts)


def rollout_detail(item: ExportItem, segment: Segment) -> dict[str, Any]:
    """One `RolloutDetail`: lists of equal length, with one entry per turn."""
    calls = [item.calls[turn.call_id] for turn in trained_spans(segment)]
    extra: dict[str, list[Any]] = {"weight_versions": [versions_of(call) for call in calls]}
    for name in sorted({name for call in calls for name in call.extras}):
        extra[name] = [call.extras.get(name) for call in calls]
    return {
        "prompt_token_ids": [call.prompt_ids for call in calls],
        "completion_token_ids": [call.output_ids for call in calls],
        "logprobs": [call.logprobs for call in calls],
        "extra": extra,
    }
