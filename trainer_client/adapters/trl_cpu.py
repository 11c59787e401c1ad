"""TRL's `AsyncGRPOTrainer` without CUDA: exact tree attention with torch's SDPA, one segment at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION


def stand_in_for_cuda() -> None:
    """Replaces the two CUDA features that the trainer's constructor uses: FlashAttention 3, and a device's FLOPs."""
    trainer: Any = async_grpo_trainer
    trainer.register_tree_attention = _register
    trainer.get_peak_flops_per_device = lambda *_: None


def _register() -> None:
    AttentionInterface.register(TREE_ATTENTION, sdpa_tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)


def sdpa_tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **tree: Any
) -> tuple[Tensor, None]:
    """Computes the same as `trl.experimental.async_grpo.packing.tree_attention`.

    Each segment's queries attend causally to the keys of its path from the root: the last query attends to all of them.
    """
    if tree.get("softcap"):
        raise ValueError("SDPA has no softcap: this model needs FlashAttention 3")
    queries, keys = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
    window, outputs = tree.get("sliding_window"), []
    for segment in range(len(queries) - 1):
        path = tree["tree_kv_index"][keys[segment] : keys[segment + 1]]
        part = query[:, :, queries[segment] : queries[segment + 1]]
        at_query = torch.arange(len(path) - part.shape[2], len(path), device=query.device)[:, None]
        at_key = torch.arange(len(path), device=query.device)[None]
        mask = (at_key <= at_query) & (at_key > at_query - window) if window else at_key <= at_query
        outputs.append(
            scaled_dot_product_attention(
                part, key[:, :, path], value[:, :, path], mask, scale=tree.get("scaling"), enable_gqa=True
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None
