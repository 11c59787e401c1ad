"""One trainer's steps on a policy, in a process of its own: rolltap's, TRL's `GRPOTrainer` or its `AsyncGRPOTrainer`.

    python -m tests.learning.steps NAME URL KEY MODEL OUT STEPS

All three take the same groups, advantages, clip bounds, optimiser and learning rate, on one thread. Each step writes a
line to `OUT/steps.jsonl`: its trained tokens, and the processor time of the process since the step before. The first
line is before the first step, so that imports and the model's start are in none.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.optimization import get_constant_schedule

from rolltap.contract.trainer import LeasedGroup
from rolltap.demo.learn import POLICY
from rolltap.trainer_client.adapters.feed import Feed, FeedSettings
from rolltap.trainer_client.adapters.rows import TrainedRow
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.folder import run_id
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.run.loop import Trainer
from rolltap.trainer_client.run.metrics import StepReport
from rolltap.trainer_client.run.sinks import Sink
from rolltap.trainer_client.settings import load_trainer_settings

GROUPS, LR, CLIP_LOW, CLIP_HIGH, GRAD_CLIP = 8, 2e-4, 0.2, 0.6, 1.0


class StepLog:
    """`OUT/steps.jsonl`."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._path, self._cpu_s = out / "steps.jsonl", time.process_time()
        self.trained_tokens = 0

    def write(self) -> None:
        """A line with what was trained since the last one."""
        now = time.process_time()
        line = {"trained_tokens": self.trained_tokens, "cpu_s": now - self._cpu_s, "at": time.monotonic()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._cpu_s, self.trained_tokens = now, 0


class OurSteps(Sink):
    """The log as a sink of our trainer."""

    def __init__(self, log: StepLog) -> None:
        self._log = log

    def write(self, report: StepReport) -> None:
        self._log.trained_tokens = report.trained_tokens
        self._log.write()

    def close(self) -> None:
        return None


class CountedFeed(Feed):
    """A foreign trainer's feed, which notes how many tokens it gives to a step."""

    log: StepLog

    def next_rows(self, recipe: Recipe, temperature: float = 1.0) -> tuple[tuple[LeasedGroup, ...], list[TrainedRow]]:
        groups, rows = super().next_rows(recipe, temperature)
        self.log.trained_tokens += sum(row.tokens for row in rows)
        return groups, rows


class TheirSteps(TrainerCallback):
    """The log as the last callback of a TRL trainer."""

    def __init__(self, log: StepLog) -> None:
        self._log = log

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log.write()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log.write()


def ours(url: str, key: str, model: Path, out: Path, steps: int) -> None:
    settings = load_trainer_settings(
        url=url, key=key, policy=POLICY, model=model, out=out, steps=steps, groups=GROUPS, checkpoint_every=steps,
        loss={"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}, optimiser={"lr": LR, "grad_clip": GRAD_CLIP},
        compute={"threads": 1, "device": "cpu"},
    )  # fmt: skip
    log, ranks = StepLog(out), Ranks.of_environment("cpu")
    trainer = Trainer(settings, TrainerClient(url, key, "ours", run=run_id(out)), ranks, [OurSteps(log)])
    log.write()
    trainer.run()
    ranks.leave()


def trl_grpo(url: str, key: str, model: Path, out: Path, steps: int) -> None:
    from trl.trainer.grpo_config import GRPOConfig

    from rolltap.trainer_client.adapters.trl_grpo import LeasedGRPOTrainer

    feed = _feed(url, key, out)
    policy = AutoModelForCausalLM.from_pretrained(model)
    arguments = GRPOConfig(
        **_arguments(out, steps), loss_type="dapo", scale_rewards="group", num_generations=2,
        per_device_train_batch_size=2, optim="adamw_torch",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = LeasedGRPOTrainer(
        policy, arguments, feed, processing_class=tokenizer, optimizers=_optimiser(policy.parameters())
    )
    _train(trainer, feed)


def trl_async(url: str, key: str, model: Path, out: Path, steps: int) -> None:
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

    from rolltap.trainer_client.adapters.trl_async import LeasedAsyncGRPOTrainer

    feed = _feed(url, key, out)
    arguments = AsyncGRPOConfig(**_arguments(out, steps), dtype="float32")
    trainer = LeasedAsyncGRPOTrainer(
        str(model), arguments, feed, processing_class=AutoTokenizer.from_pretrained(model), recipe="grpo"
    )
    _train(trainer, feed)


def _feed(url: str, key: str, out: Path) -> CountedFeed:
    client = TrainerClient(url, key, "theirs", run=run_id(out))
    feed = CountedFeed(client, FeedSettings(POLICY, GROUPS, out / "weights"), out)
    feed.log = StepLog(out)
    return feed


def _arguments(out: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(out), "max_steps": steps, "save_steps": steps, "learning_rate": LR, "epsilon": CLIP_LOW,
        "epsilon_high": CLIP_HIGH, "max_grad_norm": GRAD_CLIP, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "gradient_checkpointing": False, "max_completion_length": 100_000,
    }  # fmt: skip


def _optimiser(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimiser = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    return optimiser, get_constant_schedule(optimiser)


def _train(trainer: Any, feed: CountedFeed) -> None:
    trainer.add_callback(TheirSteps(feed.log))
    trainer.train()


TRAINERS = {"ours": ours, "trl-grpo": trl_grpo, "trl-async": trl_async}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, url, key, model, out, steps = sys.argv[1:]
    TRAINERS[name](url, key, Path(model), Path(out), int(steps))


if __name__ == "__main__":
    main()
