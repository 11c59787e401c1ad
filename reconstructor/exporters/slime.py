"""slime's recorded rollouts (`--load-debug-rollout-data`): `Sample`s in `torch.save` files, as slime writes them.

The fields are those of `slime.utils.types.Sample.to_dict()` at commit 624b824 (21 August 2026). slime is not on a
package index, so the tests compare the rows with a copy of its field names, not with its code. A sample is a segment
with loss; its response begins with the first sampled token. Samples of one rollout share a `rollout_id`, so that slime
weighs the rollout once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rolltap.reconstructor.exporters.base import (
    Container,
    ExportItem,
    Row,
    SkippedItem,
    last_span,
    stable_number,
    texts_behind,
)
from rolltap.reconstructor.exporters.conversation import Conversation, content_text, conversations
from rolltap.types import NO_VERSION, Finish, RolloutStatus, Segment


@dataclass(frozen=True, slots=True)
class Slime:
    """One sample per segment. Numbers of groups, rollouts and samples are hashes of their ids, so that they do not
    depend on the rest of the export."""

    name: ClassVar[str] = "slime"
    containers: ClassVar[tuple[Container, ...]] = ("pt",)
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def schema(self) -> Mapping[str, str]:
        return {}

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            if item.reward is None:
                yield SkippedItem("no reward")
                continue
            if not item.rows:
                yield SkippedItem("no tokens that may be trained")
            texts = {id(each.segment): each for each in conversations(item)}
            for index, segment in enumerate(item.rows):
                values = _sample(item, segment, index, texts.get(id(segment)))
                yield Row(values, texts=texts_behind(item, [turn.call_id for turn in segment.turns]))


def _sample(item: ExportItem, segment: Segment, index: int, conversation: Conversation | None) -> dict[str, Any]:
    start, end = segment.prompt_length, last_span(segment).end
    versions = segment.versions[segment.loss_mask]
    messages = conversation.messages() if conversation is not None else []
    opening = conversation.opening if conversation is not None else 0
    group = item.group_id or item.session.id
    is_late = item.rollout is not None and item.rollout.status is RolloutStatus.TIMED_OUT
    is_cut = item.calls[last_span(segment).call_id].finish is Finish.LENGTH
    return {
        "group_index": stable_number(group),
        "index": stable_number(f"{item.session.id}:{index}"),
        "rollout_id": stable_number(item.session.id),
        "prompt": messages[:opening],
        "tokens": segment.token_ids[:end],
        "response": content_text(messages[-1]) if messages else "",
        "response_length": end - start,
        "label": None,
        "reward": item.reward,
        "loss_mask": segment.loss_mask[start:end].astype(np.int32),
        "weight_versions": [str(version) for version in sorted(set(versions.tolist())) if version != NO_VERSION],
        "rollout_log_probs": segment.logprobs[start:end],
        "remove_sample": False,
        "status": "truncated" if is_late or is_cut else "completed",
        "metadata": {**item.labels(), "raw_reward": item.reward, "agent": segment.agent},
        "session_id": item.session.id,
    }
