"""TRL's AsyncGRPOTrainer under the contract suite."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from transformers import AutoTokenizer
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.trl_async import LeasedAsyncGRPOTrainer

from ..unit.trainer_client.plane import KEY
from .driver import DyingSGD, Run, Seen, TrainedToken


class Watched(LeasedAsyncGRPOTrainer):
    """Notes what its loss is given, and trains with the suite's optimiser."""

    seen: list[list[TrainedToken]]
    die_at: int | None = None
    sgd: DyingSGD

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = self.sgd = DyingSGD(self.plain_model(), self.die_at)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **named: Any) -> Any:
        while len(self.seen) <= self.state.global_step:
            self.seen.append([])
        self.seen[-1] += unpacked({name: tensor[0] for name, tensor in inputs.items()})
        return super().compute_loss(model, inputs, *args, **named)


def unpacked(inputs: dict[str, torch.Tensor]) -> list[TrainedToken]:
    """The loss terms of TRL's packed tree, each with the path of tokens that its position sees."""
    ids, labels = inputs["input_ids"], inputs["shift_labels"]
    queries, keys = inputs["tree_cu_seqlens_q"].tolist(), inputs["tree_cu_seqlens_k"].tolist()
    paths = {}
    for segment, (start, end) in enumerate(pairwise(queries)):
        path = ids[inputs["tree_kv_index"][keys[segment] : keys[segment + 1]]].tolist()
        for position in range(start, end):
            paths[position] = tuple(path[: len(path) - (end - 1 - position)])
    return [
        TrainedToken(paths[at], int(labels[at]), logprob)
        for at, logprob in zip(inputs["token_index"].tolist(), inputs["old_log_probs"].tolist(), strict=True)
    ]


class TrlAsync:
    spends_steps = True

    def __init__(self, passes: int = 1) -> None:
        self.normalise, self.advantage = "token", "dr_grpo"
        self._passes = passes

    def run(self, run: Run) -> Seen:
        arguments = AsyncGRPOConfig(
            output_dir=str(run.out),
            max_steps=run.steps,
            save_steps=1,
            logging_steps=1,
            gradient_accumulation_steps=self._passes,
            epsilon=0.1,
            epsilon_high=0.15,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            bf16=False,
            dtype="float32",
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        settings = FeedSettings("policy", run.groups, run.out / "weights", wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        trainer = Watched(str(run.model), arguments, feed, processing_class=tokenizer, recipe=self.advantage)
        trainer.seen, trainer.die_at = [], run.die_at
        trainer.train()
        logged: dict[str, list[float]] = {}
        for line in trainer.state.log_history:
            for name, value in line.items():
                logged.setdefault(name, []).append(value)
        logged["staleness"] = logged["sample/staleness_max"]
        return Seen(trainer.seen, trainer.sgd.gradient, logged)
