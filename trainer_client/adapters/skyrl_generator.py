"""SkyRL on leased groups: a generator that returns recorded rollouts, in step-wise rows.

A segment is a step row of its rollout. A rollout's rows are together, and the last has `is_last_step` and the reward,
from which SkyRL computes advantages for all of them. A masked rollout's rows have no loss, and count in the baseline.
SkyRL needs `generator.step_wise_trajectories=true`.

Groups are acknowledged when they are returned, for SkyRL's global step. SkyRL's own weight sync is not used: after a
step, its trainer's callback pushes the saved policy.
"""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rolltap.contract.leases import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed
from rolltap.trainer_client.find_recipe import make_recipe
from rolltap.trainer_client.scoring import baseline
from rolltap.types import Scoring, Segment

ADAPTERS["skyrl"].check_installed()
from skyrl.train.generators.base import (  # noqa: E402
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
)


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
    rows: list[tuple[Segment, TrajectoryID, float, bool, bool]] = []
    for group in groups:
        for number, record in enumerate(baseline(group)):
            trained = record.rollout.scoring is Scoring.SCORED
            parts = [part for part in record.trajectory.segments if part.loss_mask.any() or not trained]
            name = TrajectoryID(group.group.id, number)
            for index, part in enumerate(parts):
                last = index == len(parts) - 1
                rows.append((part, name, float(record.reward or 0.0), last, trained))
    tokens = [part.token_ids.tolist() for part, *_ in rows]
    starts = [part.prompt_length if trained else len(part) - 1 for part, *_, trained in rows]
    rests = [ids[start:] for ids, start in zip(tokens, starts, strict=True)]
    staleness = [group.staleness for group in groups]
    return GeneratorOutput(
        prompt_token_ids=[ids[:start] for ids, start in zip(tokens, starts, strict=True)],
        response_ids=rests,
        rewards=[
            [0.0] * (len(rest) - 1) + [reward if last else 0.0]
            for rest, (_, _, reward, last, _) in zip(rests, rows, strict=True)
        ],
        loss_masks=[
            [int(trained and one) for one in part.loss_mask[start:]]
            for start, (part, *_, trained) in zip(starts, rows, strict=True)
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
        is_last_step=[last for *_, last, _ in rows],
        env_metrics=None,
        pixel_values=None,
        image_grid_thw=None,
    )
