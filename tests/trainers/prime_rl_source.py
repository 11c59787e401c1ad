"""prime-rl's own code, from its source, on a CPU: what its trainer does with a step's files."""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .sources import absent

absent("wandb")
from prime_rl.configs.trainer import DefaultLossConfig  # noqa: E402
from prime_rl.trainer.rl.data import DataLoader  # noqa: E402
from prime_rl.trainer.rl.loss import (  # noqa: E402
    compute_loss,
    selective_log_softmax,
    setup_rl_loss_fn,
    shift_tensor_left,
    shift_tensor_right,
)
from prime_rl.transports.rollouts import FileSystemMicroBatchReceiver  # noqa: E402

LOSS = setup_rl_loss_fn(DefaultLossConfig(dppo_mask_low=1e9, dppo_mask_high=1e9, kl_tau=0.0))


def received(out: Path, step: int) -> list[Any]:
    """The micro batches of a step, as tensors."""
    loader = object.__new__(DataLoader)
    loader.receiver = FileSystemMicroBatchReceiver(out, 0, step)
    loader.wait_for_batch()
    return loader.get_batch()


def loss(one: Any, logits: torch.Tensor, trained: int) -> torch.Tensor:
    """As in prime-rl's train loop, behind its forward pass."""
    logprobs = shift_tensor_right(selective_log_softmax(logits, shift_tensor_left(one["input_ids"])))
    lengths = one["sequence_lengths"]
    value, _ = compute_loss(
        trainer_logprobs=logprobs.squeeze(0).split(lengths),
        inference_logprobs=one["inference_logprobs"].squeeze(0).split(lengths),
        ref_logprobs=None,
        advantages=one["advantages"].squeeze(0).split(lengths),
        loss_mask=one["loss_mask"].squeeze(0).split(lengths),
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=LOSS,
        rl_scale=trained,
        ce_scale=1,
        ref_kl_scale=1,
    )
    return value
