"""TRL's `GRPOTrainer` on leased groups: batches come from the record, everything after them is TRL's own.

It is a subclass that replaces `_generate_and_score_completions`: `rollout_func` could return only one row per rollout,
and its log-probs would not reach the loss without vLLM. A batch here has the segments' own tokens, masks and log-probs
(as `old_per_token_logps`, so the ratio is to the engine's sampling policy). Each row has its rollout's advantage,
scaled if TRL's loss takes means over rows, so that a rollout weighs once however many rows it has.

A step's rows are split into `gradient_accumulation_steps` passes of equal size; the rows that fill the last pass have
no loss. Groups are acknowledged before the optimiser's step; if they are lost, or the gradient is not finite, the step
changes no weight. Supports only one process.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed
from rolltap.trainer_client.adapters.rows import TrainedRow
from rolltap.trainer_client.adapters.trl_hooks import LeasedTrainer
from rolltap.trainer_client.recipes import make_recipe

ADAPTERS["trl-grpo"].check_installed()
from datasets import Dataset  # noqa: E402
from trl.trainer.grpo_config import GRPOConfig  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.utils import pad  # noqa: E402

RECIPES = {"group": "grpo", "none": "dr_grpo", "batch": "lite_ppo"}
"""Our recipe for each `scale_rewards` of TRL. The divisor is the standard deviation plus 1e-6; TRL adds 1e-4."""

ROW_MEANS = ("grpo", "dr_grpo")
"""Losses that divide by the number of rows; `dapo` divides by the number of trained tokens."""


class LeasedGRPOTrainer(LeasedTrainer, GRPOTrainer):
    """A `GRPOTrainer` that leases its batches and pushes its weights through `feed`. It takes no reward functions and
    no dataset: rewards are recorded."""

    def __init__(self, model: Any, args: GRPOConfig, feed: Feed, *, processing_class: Any, **options: Any) -> None:
        check_arguments(args)
        prompts = Dataset.from_dict({"prompt": [""] * (args.generation_batch_size or 1)})  # never read
        super().__init__(model, _no_reward, args, prompts, processing_class=processing_class, **options)
        self._passes, self._pad_token = args.gradient_accumulation_steps, processing_class.pad_token_id
        self.hook(feed)
        self.add_callback(_Pushes(self))

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        recipe = make_recipe(RECIPES[str(self.scale_rewards)], {})
        groups, rows = self.feed.next_rows(recipe, self.temperature)
        rewards = [record.reward for group in groups for record in group.rollouts if record.reward is not None]
        self._metrics["train"]["reward"].append(sum(rewards) / max(1, len(rewards)))
        self._metrics["train"]["staleness"].append(max(group.staleness for group in groups))
        batch = batch_of(rows, self.loss_type, self._passes, self._pad_token)
        return {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}


class _Pushes(TrainerCallback):
    """Serves the weights of the starting point, then each step's."""

    def __init__(self, trainer: LeasedGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.connect()
        self._trainer.feed.serve(self._trainer.plain_model())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.feed.push(self._trainer.plain_model(), self._trainer.feed.version + 1)


def check_arguments(args: GRPOConfig) -> None:
    """Raises `ConfigError` for arguments that would train other tokens, weights or ratios than the recorded ones, or
    not use them."""
    unusable = {
        "loss_type": args.loss_type not in ("dapo", *ROW_MEANS),
        "importance_sampling_level": args.importance_sampling_level != "token",
        "num_iterations": args.num_iterations != 1,
        "steps_per_generation": args.steps_per_generation != args.gradient_accumulation_steps,
        "beta": args.beta != 0,
        "use_vllm": args.use_vllm,
        "mask_truncated_completions": args.mask_truncated_completions,
        "multi_objective_aggregation": args.multi_objective_aggregation != "sum_then_normalize",
    }
    for name, wrong in unusable.items():
        if wrong:
            raise ConfigError(f"{name}={getattr(args, name)!r} can't be used with leased groups")


def batch_of(rows: list[TrainedRow], loss_type: str, passes: int, pad_token: int) -> dict[str, torch.Tensor]:
    """The rows in the form of TRL's loss: prompts padded on the left, the rest on the right, `passes` equal parts."""
    padded = [*rows, *rows[:1] * (-len(rows) % passes)]
    scale = len(padded) / len({row.rollout for row in rows}) if loss_type in ROW_MEANS else 1.0
    advantages = [row.advantage * scale * (row.share if loss_type == "grpo" else 1.0) for row in padded]
    parts = [row.segment for row in padded]
    prompts = [torch.from_numpy(part.token_ids[: part.prompt_length]).long() for part in parts]
    rest = [torch.from_numpy(part.token_ids[part.prompt_length :]).long() for part in parts]
    masks = [torch.from_numpy(part.loss_mask[part.prompt_length :]).long() for part in parts]
    masks = [mask * (index < len(rows)) for index, mask in enumerate(masks)]
    return {
        "prompt_ids": pad(prompts, padding_value=pad_token, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(one) for one in prompts], padding_side="left"),
        "completion_ids": pad(rest, padding_value=pad_token),
        "completion_mask": pad([torch.ones_like(one) for one in rest]),
        "tool_mask": pad(masks),
        "old_per_token_logps": pad([torch.from_numpy(part.logprobs[part.prompt_length :]) for part in parts]),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.stack([mask.sum() for mask in masks]).sum().float(),
    }


def _no_reward(completions: Any, **_: Any) -> list[float | None]:
    raise ConfigError("rewards are the record's; evaluation during training is not part of this adapter")
