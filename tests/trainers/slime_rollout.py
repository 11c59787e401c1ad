"""slime under the contract suite, called as its rollout manager and its train loop call the adapter.

With its source, its own code converts the samples, schedules and packs them, and makes the loss; without, a stand-in
that knows `Sample`'s fields alone. Megatron's model, optimiser and checkpoints need GPUs: a transformers model stands
for them.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ..unit.trainer_client.plane import KEY
from .driver import CLIP, DyingSGD, Run, Seen, TrainedToken, tokens_of
from .sources import FOLDER, Schema, Status, module, provide, strict_dataclass

WEIGHTS = "model.safetensors"


def stand_in(of: Schema) -> None:
    sample = strict_dataclass("Sample", of.fields("Sample"), Status=Status, SpecInfo=dict, PrefixCacheInfo=dict)
    sample.Status = Status
    module("slime.utils.types", Sample=sample)
    output = strict_dataclass("RolloutFnTrainOutput", of.fields("RolloutFnTrainOutput"), Sample=Any)
    module("slime.rollout.base_types", RolloutFnTrainOutput=output)
    module("slime.rollout.data_source", DataSource=ABC)


provide("slime", "", stand_in=stand_in)
from rolltap.trainer_client.adapters import slime_rollout  # noqa: E402


def arguments(run: Run) -> Any:
    """slime's, as its parser would give them for the page's command line."""
    path = "rolltap.trainer_client.adapters.slime_rollout"
    return SimpleNamespace(
        hf_checkpoint=str(run.model), save=str(run.out / "megatron"), save_hf=str(run.out / "hf-{rollout_id}"),
        save_interval=1, num_rollout=run.steps, rollout_batch_size=run.groups, rollout_global_dataset=True,
        rollout_function_path=f"{path}.generate_rollout", data_source_path=f"{path}.LeasedSource",
        custom_reward_post_process_path=f"{path}.advantages", rolltap_policy="policy", rolltap_recipe="dr_grpo",
        rolltap_weights=str(run.out / "weights"), rollout_temperature=1.0, rollout_top_p=1.0, n_samples_per_prompt=5,
        global_batch_size=None, load_debug_rollout_data=None, custom_convert_samples_to_train_data_path=None,
        reward_key=None, use_dynamic_batch_size=True, max_tokens_per_gpu=60, balance_by_flops=False,
        balance_data=False, micro_batch_size=None, advantage_estimator="grpo", normalize_advantages=False,
        use_rollout_logprobs=True, kl_coef=0.0, use_opd=False, custom_advantage_function_path=None,
        loss_type="policy_loss", eps_clip=CLIP[0], eps_clip_high=CLIP[1], eps_clip_c=None, use_opsm=False,
        use_tis=False, get_mismatch_metrics=False, use_kl_loss=False, entropy_coef=0.0, allgather_cp=False,
        recompute_loss_function=False, calculate_per_token_loss=False, log_probs_chunk_size=-1, qkv_format="thd",
        true_on_policy_mode=False, save_debug_train_data=None, use_rollout_routing_replay=False, fp16=False,
    )  # fmt: skip


class Slime:
    spends_steps = False
    normalise, advantage = "rollout", "dr_grpo"

    def run(self, run: Run) -> Seen:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ROLLTAP_TRAINER_URL", run.url)
            patch.setenv("ROLLTAP_TRAINER_KEY", KEY)
            patch.setattr(slime_rollout, "FeedSettings", quick_settings)
            return self._train(run, arguments(run))

    def _train(self, run: Run, args: Any) -> Seen:
        """slime's train loop: `load`, then for each rollout id generate, train, save the model, `save`."""
        tracker = run.out / "megatron" / "latest_checkpointed_iteration.txt"
        first = int(tracker.read_text()) + 1 if tracker.exists() else 0
        folder = args.save_hf.format(rollout_id=first - 1) if first else run.model
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        optimiser = DyingSGD(model, run.die_at, first)
        source = slime_rollout.LeasedSource(args)
        source.load(first - 1)
        seen: list[list[TrainedToken]] = []
        logged: dict[str, list[float]] = {"staleness": []}
        make_step = SourceStep(args, source) if FOLDER else SchemaStep(args, source)
        for rollout_id in range(first, args.num_rollout):
            output = slime_rollout.generate_rollout(args, rollout_id, source, evaluation=False)
            logged["staleness"].append(output.metrics["rolltap/staleness_max"])
            seen.append([])
            for loss, tokens in make_step(model, output):
                loss.backward()
                seen[-1] += tokens
            optimiser.step()
            optimiser.zero_grad()
            model.save_pretrained(args.save_hf.format(rollout_id=rollout_id))
            tracker.parent.mkdir(parents=True, exist_ok=True)
            tracker.write_text(str(rollout_id))
            source.save(rollout_id)
        return Seen(seen, optimiser.gradient, logged)


def quick_settings(*args: Any) -> Any:
    from rolltap.trainer_client.adapters.feed import FeedSettings

    return FeedSettings(*args, wait=0.2)


Losses = Iterator[tuple[torch.Tensor, list[TrainedToken]]]


class SchemaStep:
    """A step made from the samples' fields alone, a sample a pass."""

    def __init__(self, args: Any, source: Any) -> None:
        self.args = args

    def __call__(self, model: Any, output: Any) -> Losses:
        samples = [sample for group in output.samples for sample in group]
        rewards, advantages = slime_rollout.advantages(self.args, samples)
        assert len(rewards) == len(samples)
        json.dumps(rewards)
        own = {
            one.rollout_id: sum(sum(x.loss_mask) for x in samples if x.rollout_id == one.rollout_id) for one in samples
        }
        for sample, advantage in zip(samples, advantages, strict=True):
            ids, start = torch.tensor(sample.tokens), len(sample.tokens) - sample.response_length
            mask, old = torch.tensor(sample.loss_mask).bool(), torch.tensor(sample.rollout_log_probs)
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
            ratio = (logprobs - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantage)
            yield (
                -gain[mask].sum() / own[sample.rollout_id] / self.args.global_batch_size,
                response(sample.tokens, mask, old),
            )


def response(ids: Any, mask: torch.Tensor, old: torch.Tensor) -> list[TrainedToken]:
    """The trained tokens of a sample, whose arrays are of its response."""
    tokens = np.asarray(ids)
    before = torch.zeros(len(tokens) - len(mask))
    return tokens_of(tokens, torch.cat([before, mask]).numpy() > 0, torch.cat([before, old]).numpy())


class SourceStep:
    """A step by slime's own conversion, schedule, packing, advantages and loss."""

    def __init__(self, args: Any, source: Any) -> None:
        from .slime_source import manager_of

        self.args, self.manager = args, manager_of(args, source)

    def __call__(self, model: Any, output: Any) -> Losses:
        from .slime_source import losses

        yield from losses(self.args, self.manager, model, output)
