"""SkyRL on leased groups: a generator that returns recorded rollouts, in step-wise rows; `skyrl_trainer` trains on it.

A segment is a step row of its rollout. A rollout's rows are together, and the last has `is_last_step` and the reward,
from which SkyRL computes advantages for all of them. A rollout without a token to train is one row without loss, so
that its reward counts in the baseline.

Groups are acknowledged when they are returned, for SkyRL's global step.
"""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from rolltap.contract.trainer import LeasedGroup, RolloutRecord
from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed
from rolltap.trainer_client.adapters.rows import check_images
from rolltap.trainer_client.data.scoring import baseline, trained_segments
from rolltap.trainer_client.recipes import make_recipe
from rolltap.types import NO_VERSION, Scoring, Segment

ADAPTERS["skyrl"].check_installed()
from skyrl.train.generators.base import (  # noqa: E402
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
)

UNTRAINED = Segment(
    np.zeros(2, np.int32), np.zeros(2, bool), np.zeros(2, np.float32), np.full(2, NO_VERSION, np.int32), ()
)
"""Stands for a rollout that counts in the baseline and has no token to train."""


class LeasedGenerator(GeneratorInterface):
    """Use it within `feed.leasing(...)`, after `feed.connect(...)`. Prompts are not used: the rollouts are recorded."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self._check = make_recipe("dr_grpo", {})

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The next step's groups, acknowledged. Raises `ConfigError` for an evaluation, which leases don't support."""
        batch, sampling = input_batch["batch_metadata"], input_batch["sampling_params"] or {}
        if batch is None or batch.training_phase != "train":
            raise ConfigError("this generator gives training batches only: set trainer.eval_interval=-1")
        return await asyncio.to_thread(self._next_output, batch.global_step, float(sampling.get("temperature", 1.0)))

    def _next_output(self, step: int, temperature: float) -> GeneratorOutput:
        while True:
            groups, _ = self.feed.next_rows(self._check, temperature)
            if self.feed.acknowledge(step):
                return output_of(groups, self.feed.version)


def output_of(groups: Sequence[LeasedGroup], version: int) -> GeneratorOutput:
    """The groups' compared rollouts, group by group, in SkyRL's step-wise rows. `version`: at the step's start."""
    check_images(groups)
    rows: list[tuple[Segment, TrajectoryID, float, bool]] = []
    for group in groups:
        for number, record in enumerate(baseline(group) or group.rollouts[:1]):  # SkyRL misses no group
            parts = trained_parts(record) or (UNTRAINED,)
            name, reward = TrajectoryID(group.group.id, number), float(record.reward or 0.0)
            rows += [(part, name, reward, index == len(parts) - 1) for index, part in enumerate(parts)]
    tokens = [part.token_ids.tolist() for part, *_ in rows]
    starts = [part.prompt_length if part.loss_mask.any() else 1 for part, *_ in rows]
    rests = [ids[start:] for ids, start in zip(tokens, starts, strict=True)]
    staleness = [group.staleness for group in groups]
    return GeneratorOutput(
        prompt_token_ids=[ids[:start] for ids, start in zip(tokens, starts, strict=True)],
        response_ids=rests,
        rewards=[
            [0.0] * (len(rest) - 1) + [reward if last else 0.0]
            for rest, (_, _, reward, last) in zip(rests, rows, strict=True)
        ],
        loss_masks=[
            part.loss_mask[start:].astype(int).tolist() for start, (part, *_) in zip(starts, rows, strict=True)
        ],
        stop_reasons=["stop"] * len(rows),
        rollout_metrics={
            "rolltap/version": version,
            "rolltap/staleness_max": max(staleness),
            "rolltap/staleness_mean": sum(staleness) / len(staleness),
        },
        rollout_logprobs=[part.logprobs[start:].tolist() for start, (part, *_) in zip(starts, rows, strict=True)],
        trajectory_ids=[name for _, name, *_ in rows],
        trajectory_generation_times=None,
        trajectory_time_splits=None,
        rollout_expert_indices=None,
        rollout_sample_support=None,
        is_last_step=[last for *_, last in rows],
        env_metrics=None,
        pixel_values=None,
        image_grid_thw=None,
    )


def trained_parts(record: RolloutRecord) -> tuple[Segment, ...]:
    return trained_segments(record) if record.rollout.scoring is Scoring.SCORED else ()
