"""Run in an environment with NeMo Gym: its models of a rollout, and its profile of rewards."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.types import Segment

from .dataset_world import conversation, world_in, written


def in_group(item: ExportItem, group: str) -> ExportItem:
    assert item.rollout is not None
    return replace(item, rollout=replace(item.rollout, group_id=group))


def trained(output: list[Any], segment: Segment) -> int:
    """How many replies carry ids, each behind the one before it; they are the segment's tokens and log-probs."""
    from nemo_gym.openai_utils import TokenIDLogProbMixin  # type: ignore[import-not-found]

    ids: list[int] = []
    on = np.zeros(len(segment), bool)
    logprobs = np.zeros(len(segment), np.float32)
    replies = [item for item in output if isinstance(item, TokenIDLogProbMixin)]
    for item in replies:
        assert item.prompt_token_ids[: len(ids)] == ids, "NeMo RL asserts this"
        ids = [*item.prompt_token_ids, *item.generation_token_ids]
        begin = len(item.prompt_token_ids)
        on[begin : len(ids)] = True
        logprobs[begin : len(ids)] = item.generation_log_probs
    assert ids == segment.token_ids[: len(ids)].tolist()
    assert np.array_equal(on, segment.loss_mask)
    assert np.array_equal(logprobs, segment.logprobs)
    return len(replies)


def main() -> None:
    from nemo_gym.base_resources_server import BaseVerifyResponse  # type: ignore[import-not-found]
    from nemo_gym.reward_profile import RewardProfiler  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as name:
        world = world_in(Path(name) / "model")
        groups = [
            [in_group(conversation(world, f"{group}{index}", think=True, cut=index == 1), group) for index in range(2)]
            for group in ("a", "b")
        ]
        forked = world.with_subagent("forked").item(reward=0.5, task="forked")
        file, reasons = written(Path(name) / "rollouts", "nemo-gym", [*groups, [forked]])
        assert reasons == ["more than one run of tokens"]
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        replies = 0
        for row, item in zip(rows, [item for group in groups for item in group], strict=True):
            read = BaseVerifyResponse.model_validate(row)
            assert read.reward == item.reward
            (segment,) = item.rows
            replies += trained(read.response.output, segment)
        results = [BaseVerifyResponse.model_validate(row).model_dump() | row for row in rows]
        pairs = RewardProfiler().align_rows_and_results(rows, results)
        by_task, by_agent = RewardProfiler().profile_from_data(rows, results)
        assert (len(pairs), len(by_task), [one["agent_ref"]["name"] for one in by_agent]) == (4, 2, ["codex"])
        assert by_agent[0]["mean/reward"] == 1.0
    sys.stdout.write(f"{len(rows)} rollouts of {len(by_task)} tasks, {replies} replies with our ids and log-probs\n")


if __name__ == "__main__":
    main()
