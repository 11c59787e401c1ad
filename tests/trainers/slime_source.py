"""slime's own code, from its source, on a CPU: what its rollout manager and its Megatron actor do with samples."""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ..conftest import free_port
from .driver import TrainedToken
from .sources import absent, module

absent("wandb", "sglang", "sglang.srt", "sglang.srt.constants")
absent(*(f"slime.backends.sglang_utils.{name}" for name in ("external", "sglang_config", "sglang_engine")))
from megatron.core import mpu  # noqa: E402
from slime.backends.megatron_utils import data, loss  # noqa: E402
from slime.ray import rollout  # noqa: E402

KEYS = [
    "tokens", "multimodal_train_inputs", "total_lengths", "response_lengths", "loss_masks", "advantages", "returns",
    "rollout_log_probs", "rollout_mask_sums", "log_probs",
]  # fmt: skip


def manager_of(args: Any, source: Any) -> Any:
    """slime's rollout manager without its engines."""
    if not mpu.is_initialized():
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        mpu.initialize_model_parallel()
        loss.accelerator = data.accelerator = module("cpu", device=lambda: "cpu", current_device=lambda: "cpu")
        rollout.ray.put = lambda value, **_: value
    kind = rollout.RolloutManager.__ray_metadata__.modified_class
    manager = object.__new__(kind)
    manager.args, manager.data_source = args, source
    manager.custom_convert_samples_to_train_data_func = None
    manager.custom_reward_post_process_func = rollout.load_function(args.custom_reward_post_process_path)
    manager.set_train_parallel_config(
        {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    )
    return manager


def losses(args: Any, manager: Any, model: Any, output: Any) -> Iterator[tuple[torch.Tensor, list[TrainedToken]]]:
    """The loss of each micro batch, in slime's terms, and the trained tokens in it."""
    from .slime_rollout import response

    manager.generate_rollout = lambda *_, **__: output
    samples, metrics = manager._get_rollout_data(rollout_id=0)
    assert metrics == output.metrics
    assert samples == list(itertools.chain.from_iterable(output.samples))
    (box,) = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))
    batch = box.inner
    lengths = batch.pop("total_lengths")
    batch["total_lengths"] = [lengths[index] for index in batch["partition"]]
    loss.compute_advantages_and_returns(args, batch)
    (iterator,) = data.get_data_iterator(batch)
    (count,), (rollouts,) = batch["num_microbatches"], batch["global_batch_sizes"]
    for _ in range(count):
        packed = data.get_batch(iterator, KEYS, pad_multiplier=8)
        logits = torch.cat([model(ids[None]).logits[0] for ids in packed["unconcat_tokens"]])
        padding = packed["tokens"].shape[1] - len(logits)
        logits = torch.nn.functional.pad(logits, (0, 0, 0, padding))[None].float()
        value, normaliser, _ = loss.loss_function(args, packed, count, rollouts, logits)
        tokens: list[TrainedToken] = []
        for ids, mask, old in zip(
            packed["unconcat_tokens"], packed["loss_masks"], packed["rollout_log_probs"], strict=True
        ):
            tokens += response(ids, mask, old)
        yield value / normaliser / count, tokens  # Megatron's schedule divides by both
