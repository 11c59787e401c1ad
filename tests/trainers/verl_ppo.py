"""verl under the contract suite: its trainer, FSDP engine, loss and checkpoints, in one process without Ray."""

# pyright: reportMissingImports=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import torch
from hydra import compose, initialize_config_module

from . import verl_cpu

verl_cpu.register()
from verl.workers.engine_workers import ActorRolloutRefWorker  # type: ignore[import-not-found]  # noqa: E402

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed  # noqa: E402
from rolltap.trainer_client.adapters.verl_trainer import LeasedPPOTrainer  # noqa: E402

from ..conftest import free_port  # noqa: E402
from ..unit.trainer_client.making import VOCABULARY  # noqa: E402
from ..unit.trainer_client.plane import KEY  # noqa: E402
from .driver import DyingSGD, Run, Seen, TrainedToken, tokens_of  # noqa: E402
from .verl_queue import Queue  # noqa: E402

PORT = free_port()
QUEUE = Queue()
FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


def config_of(run: Run) -> Any:
    chosen = {
        "data.train_files": "unread",
        "data.val_files": "unread",
        "data.train_batch_size": 1,
        "actor_rollout_ref.model.path": run.model,
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.fsdp_config.strategy": "fsdp2",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision": FLOAT32,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 200,
        "actor_rollout_ref.actor.clip_ratio_low": 0.1,
        "actor_rollout_ref.actor.clip_ratio_high": 0.15,
        "actor_rollout_ref.actor.clip_ratio_c": 1000.0,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.grad_clip": 1e9,
        "actor_rollout_ref.actor.optim.clip_grad": 1e9,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,extra]",
        "actor_rollout_ref.actor.checkpoint.load_contents": "[model,extra]",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.rollout_correction.bypass_mode": True,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": 1,
        "trainer.logger": "[]",
        "trainer.total_training_steps": run.steps,
        "trainer.default_local_dir": run.out / "checkpoints",
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"{name}={value}" for name, value in chosen.items()])


class InProcess:
    """Stands for a Ray worker group of one worker."""

    _dispatch_info: dict[str, list[int]] = {"actor": [0]}  # noqa: RUF012

    def __init__(self, config: Any, seen: list[list[TrainedToken]], die_at: int | None) -> None:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")  # verl would name the CPU's backend twice
        self.worker = ActorRolloutRefWorker(config=config, role="actor")
        self.worker.init_model()
        self.engine = self.worker.actor.engine
        self.optimiser = self.engine.optimizer = DyingSGD(self.engine.module, die_at)
        self.worker.set_loss_fn(watching(self.worker.loss_fn, seen))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def update_actor(self, batch: Any) -> Any:
        return self.worker.update_actor(QUEUE.data_of(batch))


def watching(loss: Any, seen: list[list[TrainedToken]]) -> Any:
    """The loss, which notes the rows that it is given."""

    def noted(model_output: Any, data: Any, **named: Any) -> Any:
        fields = ("prompts", "responses", "response_mask", "old_log_probs")
        for prompt, response, mask, logprobs in zip(*(data[name].unbind() for name in fields), strict=True):
            ids, none = torch.cat([prompt, response]), torch.zeros(len(prompt))
            seen[-1] += tokens_of(
                ids.numpy(), torch.cat([none, mask]).numpy() > 0, torch.cat([none, logprobs]).float().numpy()
            )
        return loss(model_output=model_output, data=data, **named)

    return noted


class Watched(LeasedPPOTrainer):
    """All of verl's trainer but Ray's workers: no process is started for the actor, none for rewards."""

    def __init__(self, config: Any, feed: Any, run: Run) -> None:
        self.run, self.seen = run, []
        super().__init__(config, feed)
        self.logged: dict[str, list[float]] = {}

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = InProcess(self.config.actor_rollout_ref, self.seen, self.run.die_at)
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self._load_checkpoint()
        done = self.global_steps
        if self.actor_rollout_wg.optimiser.dies_in is not None:
            self.actor_rollout_wg.optimiser.dies_in -= done

    def _write_weights(self, version: int) -> None:
        asyncio.run(self.actor_rollout_wg.worker.update_weights(global_steps=version, mode="rolltap"))

    def prepare_step(self) -> dict[str, Any]:
        self.seen.append([])
        return super().prepare_step()

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **named: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **named)
        for name, value in metrics.items():
            self.logged.setdefault(name, []).append(value)


class VerlPpo:
    spends_steps = False
    normalise, advantage = "token", "dr_grpo"

    def run(self, run: Run) -> Seen:
        config = config_of(run)
        QUEUE.rows.clear()
        QUEUE.install()
        settings = FeedSettings("policy", run.groups, run.out / "weights", wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        with feed.leasing(VOCABULARY):
            trainer = Watched(config, feed, run)
            trainer.init()
            trainer.fit(None)
        gradient = {name: one.full_tensor() for name, one in trainer.actor_rollout_wg.optimiser.gradient.items()}
        trainer.logged["staleness"] = trainer.logged["training/off_policy/trajectory_staleness_worst/max"]
        return Seen(trainer.seen, gradient, trainer.logged)
