"""SkyRL under the contract suite: its checks, batch tensors, advantages and loss on the generator's output.

Its trainer needs a GPU: the step is made here, on its numbers.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils import ppo_utils  # type: ignore[import-not-found]
from skyrl.train.config import AlgorithmConfig  # type: ignore[import-not-found]
from skyrl.train.dataset.preprocess import (  # type: ignore[import-not-found]
    convert_prompts_responses_to_batch_tensors,
)
from skyrl.train.generators.base import BatchMetadata  # type: ignore[import-not-found]
from skyrl.train.trainer import RayPPOTrainer  # type: ignore[import-not-found]
from skyrl.train.utils.trainer_utils import validate_generator_output  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.skyrl_generator import LeasedGenerator

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import Run, Seen, tokens_of


class SkyRl:
    spends_steps = False
    normalise, advantage = "token", "dr_grpo"

    def run(self, run: Run) -> Seen:
        settings = FeedSettings("policy", run.groups, run.out / "weights", wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        with feed.leasing(VOCABULARY):
            feed.connect(None, 0, AutoTokenizer.from_pretrained(run.model))
            batch: Any = {"batch_metadata": BatchMetadata(1, "train"), "sampling_params": {"temperature": 1.0}}
            output = asyncio.run(LeasedGenerator(feed).generate(batch))
        validate_generator_output(run.groups, output, step_wise=True)
        return self._step(run, output)

    def _step(self, run: Run, output: Any) -> Seen:
        sequences, attention, response, rewards, loss, old, *_ = convert_prompts_responses_to_batch_tensors(
            0,
            output["prompt_token_ids"],
            output["response_ids"],
            [torch.tensor(one) for one in output["rewards"]],
            output["loss_masks"],
            output["rollout_logprobs"],
        )
        seen, width = [], response.shape[1]
        for row in range(len(sequences)):
            whole = attention[row].bool()
            none = torch.zeros(sequences.shape[1] - width)
            mask, logprobs = torch.cat([none, loss[row]])[whole], torch.cat([none, old[row]])[whole]
            seen += tokens_of(sequences[row][whole].numpy(), mask.numpy(), logprobs.numpy())
        config = AlgorithmConfig(
            advantage_estimator="grpo", grpo_norm_by_std=False, eps_clip_low=0.1, eps_clip_high=0.15
        )
        advantages = self._advantages(output, rewards, response, config)
        model = AutoModelForCausalLM.from_pretrained(run.model, attn_implementation="eager")
        places = (attention.cumsum(1) - 1).clamp(min=0)
        logits = model(sequences, attention_mask=attention, position_ids=places).logits
        chosen = logits.log_softmax(-1)[:, :-1].gather(-1, sequences[:, 1:, None])[..., 0][:, -width:]
        value, _ = ppo_utils.ppo_policy_loss(chosen, old, advantages, config, loss_mask=loss)
        (value / loss.sum()).backward()  # its token mean, which it makes of the advantages
        gradient = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return Seen([seen], gradient, {"staleness": [output["rollout_metrics"]["rolltap/staleness_max"]]})

    def _advantages(self, output: Any, rewards: Any, response: Any, config: Any) -> torch.Tensor:
        """By SkyRL's own trainer, from the last step's reward to all steps of a trajectory."""
        data: Any = _Batch(rewards=rewards, response_mask=response, values=None)
        data.metadata = {
            "is_last_step": output["is_last_step"],
            "uids": [name.instance_id for name in output["trajectory_ids"]],
            "avg_response_length": 0.0,
        }
        trainer = SimpleNamespace(
            cfg=SimpleNamespace(
                generator=SimpleNamespace(step_wise_trajectories=True), trainer=SimpleNamespace(algorithm=config)
            ),
            all_metrics={},
        )
        RayPPOTrainer.compute_advantages_and_returns(trainer, data)
        return data["advantages"]


class _Batch(dict[str, Any]):
    metadata: dict[str, Any]

    def to(self, _: str) -> _Batch:
        return self
