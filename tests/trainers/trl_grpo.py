"""TRL's GRPOTrainer under the contract suite."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.trl_grpo import LeasedGRPOTrainer

from ..unit.trainer_client.plane import KEY
from .driver import DyingSGD, Run, Seen, TrainedToken, tokens_of


class Watched(LeasedGRPOTrainer):
    """Notes what its loss is given."""

    seen: list[list[TrainedToken]]

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        while len(self.seen) <= self.state.global_step:
            self.seen.append([])
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        real = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1).bool()
        mask = torch.cat([torch.zeros_like(inputs["prompt_mask"]), inputs["tool_mask"]], 1)
        logprobs = torch.cat([torch.zeros_like(inputs["prompt_mask"]), inputs["old_per_token_logps"]], 1)
        for row, keep in enumerate(real):
            row_arrays = [array[row][keep].numpy() for array in (ids, mask, logprobs)]
            self.seen[-1] += tokens_of(*row_arrays)
        return super()._compute_loss(model, inputs)


class TrlGrpo:
    spends_steps = True

    def __init__(self, loss_type: str = "dapo", normalise: str = "token", passes: int = 1) -> None:
        self.normalise, self.advantage = normalise, "dr_grpo"
        self._loss_type, self._passes = loss_type, passes

    def run(self, run: Run) -> Seen:
        model = AutoModelForCausalLM.from_pretrained(run.model, attn_implementation="eager")
        arguments = GRPOConfig(
            output_dir=str(run.out),
            max_steps=run.steps,
            save_steps=1,
            logging_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            gradient_accumulation_steps=self._passes,
            loss_type=self._loss_type,
            scale_rewards="none",
            max_completion_length=100,
            epsilon=0.1,
            epsilon_high=0.15,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        optimiser = DyingSGD(model, run.die_at)
        settings = FeedSettings("policy", run.groups, run.out / "weights", wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        trainer = Watched(
            model,
            arguments,
            feed,
            processing_class=AutoTokenizer.from_pretrained(run.model),
            optimizers=(optimiser, None),
        )
        trainer.seen = []
        trainer.train()
        logged: dict[str, list[float]] = {}
        for line in trainer.state.log_history:
            for name, value in line.items():
                logged.setdefault(name, []).append(value)
        return Seen(trainer.seen, optimiser.gradient, logged)
