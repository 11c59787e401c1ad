"""The full record: one row a segment, with its arrays, turns, rewards and conversation.

Segments without loss (side calls, abandoned beginnings of a history) are rows too; `loss_mask` says so. This is the
format to keep: every other one can be made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, Skipped
from rolltap.types import Break, Segment

COLUMNS: Mapping[str, str] = {
    "session_id": "string",
    "rollout_id": "string",
    "group_id": "string",
    "task_id": "string",
    "reward": "float64",
    "row_index": "int32",
    "policy": "string",
    "harness": "string",
    "status": "string",
    "scoring": "string",
    "agent": "string",
    "kind": "string",
    "prompt_length": "int32",
    "token_ids": "list<int32>",
    "loss_mask": "list<bool>",
    "logprobs": "list<float32>",
    "versions": "list<int32>",
    "oldest_version": "int32",
    "newest_version": "int32",
    "turns": "json",
    "extras": "json",
    "break": "json",
    "rewards": "json",
    "sampling": "json",
    "messages": "json",
    "tools": "json",
    "created_at": "float64",
    "tags": "json",
}


@dataclass(frozen=True, slots=True)
class Trajectories:
    """See the module."""

    name: ClassVar[str] = "trajectories"
    containers: ClassVar[tuple[Container, ...]] = ("parquet", "jsonl")
    faithful: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return COLUMNS

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | Skipped]:
        for item in group:
            if not item.trajectory.segments:
                yield Skipped("no tokens on record")
            breaks = {found.call_id: found for found in item.trajectory.breaks}
            for index, segment in enumerate(item.trajectory.segments):
                yield _row(item, segment, index, breaks)


def _row(item: ExportItem, segment: Segment, index: int, breaks: Mapping[str, Break]) -> Row:
    last = item.texts.get(segment.turns[-1].call_id)
    found = breaks.get(segment.turns[0].call_id)
    versions = segment.versions[segment.loss_mask]
    values: dict[str, Any] = {
        **item.labels(),
        "row_index": index,
        "policy": item.session.policy,
        "harness": item.harness,
        "status": item.rollout.status.value if item.rollout else None,
        "scoring": item.rollout.scoring.value if item.rollout else None,
        "agent": segment.agent,
        "kind": segment.kind.value,
        "prompt_length": segment.prompt_length,
        "token_ids": segment.token_ids,
        "loss_mask": segment.loss_mask,
        "logprobs": segment.logprobs,
        "versions": segment.versions,
        "oldest_version": int(versions.min()) if len(versions) else None,
        "newest_version": int(versions.max()) if len(versions) else None,
        "turns": [asdict(turn) for turn in segment.turns],
        "extras": {name: array.tolist() for name, array in segment.extras.items()},
        "break": asdict(found) if found is not None else None,
        "rewards": list(_rewards(item)),
        "sampling": dict(last.sampling) if last is not None else None,
        "messages": last.conversation if last is not None else None,
        "tools": list(last.tools) if last is not None else None,
        "created_at": item.session.created_at,
        "tags": {**item.session.tags, **dict.fromkeys(item.tags, "")},
    }
    return Row(values, texts=(values["messages"], values["tools"]))


def _rewards(item: ExportItem) -> Iterator[dict[str, Any]]:
    for reward in item.rewards:
        yield {"scope": reward.scope, "value": reward.value, "source": reward.source, "detail": dict(reward.detail)}
