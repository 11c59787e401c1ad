"""OpenEnv's sessions under the contract suite: TRL's rollout loop takes them apart, and its trainer makes the step.

TRL's worker runs the loop in a process beside a vLLM server. Here each generation is asked of the loop itself, and the
scored samples are put into the trainer's queue. TRL divides advantages by the population's deviation, ours by the
sample's: for groups of one size, this is one factor.
"""

from __future__ import annotations

import asyncio
import queue
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample
from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

from rolltap.trainer_client.adapters.openenv_sessions import LeasedSessionFactory, SessionSettings
from rolltap.trainer_client.adapters.trl_cpu import stand_in_for_cuda
from rolltap.trainer_client.adapters.trl_hooks import NoWorker

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import CLIP, DyingSGD, Run, Seen, TrainedToken
from .trl_async import unpacked

GENERATIONS = 4
"""Of the five rollouts of a group of world.py one is unscorable."""


def loop_of(run: Run, tokenizer: Any) -> _HarnessRolloutLoop:
    """TRL's, as its worker's child process makes it."""
    settings = SessionSettings("policy", GENERATIONS, VOCABULARY, tokenizer, wait=0.2)
    tokenizer.response_template = {}  # nothing is parsed
    factory = partial(LeasedSessionFactory, run.url, KEY, settings, "a-run")
    factory()  # if it refuses, TRL's loop would stay open
    return _HarnessRolloutLoop(
        harness_session_factory=factory,
        model_name="policy",
        dataset=Dataset.from_dict({"prompt": [""]}),
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[1],
        rollout_buffer=queue.Queue(),  # type: ignore[arg-type]
        model_version_value=SimpleNamespace(value=0),  # type: ignore[arg-type]
        heartbeat_value=SimpleNamespace(value=0.0),  # type: ignore[arg-type]
        failed_event=None,  # type: ignore[arg-type]
        exception_info_queue=queue.Queue(),  # type: ignore[arg-type]
        metrics_queue=queue.Queue(),  # type: ignore[arg-type]
        num_generations=GENERATIONS,
        max_inflight_tasks=1,  # a group may be closed before the last of its generations is asked for
    )


async def samples_of(loop: _HarnessRolloutLoop, groups: int) -> tuple[list[RolloutSample], set[int]]:
    """The samples of so many groups, generated and scored by TRL's loop, and how many rollouts each compares."""
    samples: list[RolloutSample] = []
    sizes = set()
    for number in range(groups):
        made = await asyncio.gather(*(loop._generate_one([], {}, [], number) for _ in range(GENERATIONS)))
        completions, ids, sequences, calls, failures, rewards = (list(part) for part in zip(*made, strict=True))
        group = RolloutGroup(
            [[]] * GENERATIONS,
            {},
            completions,
            ids,
            sequences,
            calls,
            failures,
            0,
            number,
            [None] * GENERATIONS,
            rewards,
        )
        samples += await loop._score_group(group)
        sizes.add(sum(reward is not None for reward in rewards))
    return samples, sizes


class Watched(AsyncGRPOTrainer):
    """Notes what its loss is given, and trains with the suite's optimiser."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.seen: list[TrainedToken] = []
        self.optimizer = self.sgd = DyingSGD(self.accelerator.unwrap_model(self.model), None)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **named: Any) -> Any:
        self.seen += unpacked({name: tensor[0] for name, tensor in inputs.items()})
        return super().compute_loss(model, inputs, *args, **named)


class NoTransfer:
    """TRL's weight transfer, which OpenEnv's sessions leave as it is, without engines."""

    def init_weight_transfer(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def trained(run: Run, samples: list[RolloutSample], tokenizer: Any) -> Watched:
    """TRL's trainer after a step on all samples."""
    arguments = AsyncGRPOConfig(
        output_dir=str(run.out),
        max_steps=1,
        save_strategy="no",
        per_device_train_batch_size=len(samples),
        gradient_accumulation_steps=1,
        token_budget=0,
        epsilon=CLIP[0],
        epsilon_high=CLIP[1],
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        dtype="float32",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    worker = NoWorker()
    for sample in samples * 2:  # its loader is a batch ahead
        worker.rollout_buffer.put(sample)
    stand_in_for_cuda()
    trainer = Watched(
        str(run.model),
        None,
        arguments,
        Dataset.from_dict({"prompt": [""]}),
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
    )
    trainer.train()
    return trainer


class OpenEnvSessions:
    spends_steps = True
    normalise, advantage = "token", "grpo"

    def run(self, run: Run) -> Seen:
        PartialState()
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        loop = loop_of(run, tokenizer)
        with closing(loop._loop), loop._session_pool, loop._tool_pool:
            samples, sizes = loop._loop.run_until_complete(samples_of(loop, run.groups))
        trainer = trained(run, samples, tokenizer)
        (size,) = sizes
        factor = ((size - 1) / size) ** 0.5
        return Seen([trainer.seen], {name: one * factor for name, one in trainer.sgd.gradient.items()}, {})
