"""TRL's `AsyncGRPOTrainer` on leased groups: TRL's tree packing, loss and times of weight transfer; our record.

It gets a rollout worker that does nothing, and a weight transfer that pushes to the policy. Its data loader is
replaced: TRL's own takes rows from a queue regardless of steps and fetches one batch ahead, so that the groups of a
step would be unknown. Here one lease is one step, split into `gradient_accumulation_steps` passes. The mean is over all
trained tokens of the step, as with one pass. If a step has fewer rows than passes, it is filled with rows of advantage
0.

`model_version` is the policy's weight version. Without CUDA, torch's SDPA replaces FlashAttention 3.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from rolltap.contract.trainer import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed
from rolltap.trainer_client.adapters.rows import TrainedRow
from rolltap.trainer_client.adapters.trl_hooks import LeasedTrainer, NoWorker, Push
from rolltap.trainer_client.recipes import make_recipe

ADAPTERS["trl-async"].check_installed()
from datasets import Dataset  # noqa: E402
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig  # noqa: E402
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout  # noqa: E402
from trl.experimental.async_grpo.packing import TreeRow  # noqa: E402

from rolltap.trainer_client.adapters.trl_cpu import stand_in_for_cuda  # noqa: E402


class LeasedAsyncGRPOTrainer(LeasedTrainer, AsyncGRPOTrainer):
    """An `AsyncGRPOTrainer` that leases its batches and pushes its weights through `feed`. The feed's `max_staleness`
    limits staleness; `recipe` is one of rolltap's."""

    def __init__(self, model: str, args: AsyncGRPOConfig, feed: Feed, *, recipe: str = "grpo", **options: Any) -> None:
        check_arguments(args)
        if not torch.cuda.is_available():
            stand_in_for_cuda()
        prompts = Dataset.from_dict({"prompt": [""]})  # never read
        super().__init__(model, None, args, prompts, rollout_worker=NoWorker(), weight_transfer=Push(self), **options)
        self.recipe = make_recipe(recipe, {})
        self.hook(feed)

    def get_train_dataloader(self) -> DataLoader[Any]:
        self._rollout_dataset = _Leases(self)
        return DataLoader(self._rollout_dataset, batch_size=None)

    def batches(self, groups: Sequence[LeasedGroup], rows: list[TrainedRow]) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of a step, one per pass."""
        metrics, passes = self._metrics["train"], self.args.gradient_accumulation_steps
        metrics["sample/staleness_max"].append(float(max(group.staleness for group in groups)))
        metrics["sample/staleness_mean"].append(sum(group.staleness for group in groups) / len(groups))
        numbers = {group.group.id: len(self._trained_groups) + index for index, group in enumerate(groups)}
        rewards = {record.rollout.id: record.reward for group in groups for record in group.rollouts}
        samples = [sample_of(row, numbers[row.group], {"reward": rewards[row.rollout] or 0.0}) for row in rows]
        samples += [{**samples[0], "advantage": 0.0}] * max(0, passes - len(samples))
        collate = DataCollatorForRollout(
            self.processing_class.pad_token_id,
            1,
            groups_trained=self._trained_groups,
            metrics=metrics,  # type: ignore[union-attr]
        )
        per_pass = torch.tensor([sum(row.tokens for row in rows) / passes])
        for part in np.array_split(np.arange(len(samples)), passes):
            packed = TreeRow()
            for index in part:
                packed.add(samples[index])
            yield {**collate.torch_call([[packed]]), "global_n_tokens": per_pass}


class _Leases(IterableDataset[Any]):
    """The batches of each step. A step is leased only when it is requested. `wait_s`: the wait that TRL reports."""

    def __init__(self, trainer: LeasedAsyncGRPOTrainer) -> None:
        self._trainer = trainer
        self.wait_s = 0.0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            started = time.monotonic()
            groups, rows = self._trainer.feed.next_rows(self._trainer.recipe, self._trainer.temperature)
            self.wait_s += time.monotonic() - started
            yield from self._trainer.batches(groups, rows)


def check_arguments(args: AsyncGRPOConfig) -> None:
    """Raises `ConfigError` for arguments that would leave out groups or push at other times than between steps."""
    if args.token_budget:
        raise ConfigError("token_budget drops long rows: leave it out, gradient_accumulation_steps deals the rows")
    if args.weight_sync_steps != 1:
        raise ConfigError("weight_sync_steps is 1: each step is a weight version")


def sample_of(row: TrainedRow, group: int, metrics: dict[str, float]) -> dict[str, Any]:
    """The row in the form of TRL's packing."""
    part = row.segment
    return {
        "input_ids": part.token_ids,
        "completion_mask": part.loss_mask.astype(np.int64),
        "old_log_probs": part.logprobs,
        "advantage": row.advantage,
        "group_id": group,
        "metrics": metrics,
    }
