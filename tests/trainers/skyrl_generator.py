"""SkyRL under the contract suite: its trainer's own loop, with its batches, advantages, loss and checkpoints.

Its workers need GPUs and Ray: a transformers model stands for them behind SkyRL's dispatch, and takes the loss from
SkyRL's registry. The loss is `rollout_is`, which compares with the engine's log-probs as ours does; it drops tokens
where ours clips them, so its bounds are off here.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # type: ignore[import-not-found]
from skyrl.train.config import SkyRLTrainConfig  # type: ignore[import-not-found]
from skyrl.train.utils.tracking import Tracking  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.skyrl_trainer import LeasedSkyRlTrainer, NoPrompts

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import DyingSGD, Run, Seen, TrainedToken, tokens_of


def configuration(run: Run) -> Any:
    """SkyRL's, as its command line would give it."""
    cfg = SkyRLTrainConfig()
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    algorithm.advantage_estimator, algorithm.grpo_norm_by_std = "grpo", False
    algorithm.policy_loss_type, algorithm.use_kl_loss = "rollout_is", False
    algorithm.eps_clip_low = algorithm.eps_clip_high = SkyRl.clip[0]
    trainer.placement.colocate_all, trainer.enable_ray_gpu_monitor = False, False
    trainer.train_batch_size = trainer.policy_mini_batch_size = run.groups
    trainer.ckpt_path, trainer.ckpt_interval = str(run.out / "skyrl"), 1
    trainer.epochs, trainer.max_training_steps, trainer.eval_interval = 1, run.steps, -1
    cfg.generator.step_wise_trajectories = True
    cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    cfg.data.dataloader.num_workers, cfg.data.dataloader.persistent_workers = 0, False
    return cfg


class Dispatch:
    """What SkyRL's trainer asks its workers for. It has no sync of weights: the adapter's pushes stand for it."""

    def __init__(self, run: Run, cfg: Any) -> None:
        self.cfg = cfg
        self.model = AutoModelForCausalLM.from_pretrained(run.model, attn_implementation="eager")
        self.optimiser = DyingSGD(self.model, run.die_at)
        self.loss = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)
        self.seen: list[list[TrainedToken]] = []

    def get_lcm_dp_size(self) -> int:
        return 1

    def stage_data(self, _: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        return [data[start:end] for start, end in boundaries]

    def forward_backward_from_staged(self, _: str, data: Any) -> Any:
        sequences, attention, width = data["sequences"], data["attention_mask"], data["response_mask"].shape[1]
        places = (attention.cumsum(1) - 1).clamp(min=0)
        logits = self.model(sequences, attention_mask=attention, position_ids=places).logits
        chosen = logits.log_softmax(-1)[:, :-1].gather(-1, sequences[:, 1:, None])[..., 0][:, -width:]
        old, mask = data["rollout_logprobs"], data["loss_mask"]
        loss, metrics = self.loss(
            chosen,
            data["action_log_probs"],
            data["advantages"],
            config=self.cfg.trainer.algorithm,
            loss_mask=mask,
            rollout_logprobs=old,
        )
        loss.backward()
        self.seen.append([])
        none = torch.zeros(sequences.shape[1] - width)
        for row in range(len(sequences)):
            whole = attention[row].bool()
            trained, logprobs = (torch.cat([none, one[row]])[whole].numpy() for one in (mask, old))
            self.seen[-1] += tokens_of(sequences[row][whole].numpy(), trained, logprobs)
        return SimpleNamespace(metrics=metrics)

    def optim_step(self, _: str) -> None:
        self.optimiser.step()
        self.optimiser.zero_grad()

    def save_checkpoint(self, _: str, folder: str, tokenizer: Any) -> None:
        self.model.save_pretrained(folder)

    save_hf_model = save_checkpoint

    def load_checkpoint(self, _: str, folder: str, **parts: bool) -> None:
        self.model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())

    def empty_cache(self, *_: str) -> None:
        return None

    finalize_pending_saves = empty_cache

    def get_timing_metrics(self) -> dict[str, float]:
        return {}


class Tracker(Tracking):
    """SkyRL's tracker, which is noted too."""

    def __init__(self) -> None:
        super().__init__("rolltap", "contract", "console")
        self.staleness: list[float] = []

    def log(self, data: Any, step: int, commit: bool = False) -> None:
        self.staleness.append(data["rolltap/staleness_max"])
        super().log(data, step, commit)


class Trainer(LeasedSkyRlTrainer):
    def _cleanup_old_checkpoints(self) -> None:
        """Runs on Ray, and keeps all of them by default."""


class SkyRl:
    spends_steps = False
    normalise, advantage = "token", "dr_grpo"
    clip = (1e9, 1e9)

    def run(self, run: Run) -> Seen:
        settings = FeedSettings("policy", run.groups, run.out / "weights", wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        cfg, tracker = configuration(run), Tracker()
        trainer = Trainer(
            feed,
            VOCABULARY,
            cfg,
            tracker=tracker,
            tokenizer=AutoTokenizer.from_pretrained(run.model),
            train_dataset=NoPrompts(run.steps, run.groups),
        )
        trainer.dispatch = Dispatch(run, cfg)
        asyncio.run(trainer.train())
        return Seen(trainer.dispatch.seen, trainer.dispatch.optimiser.gradient, {"staleness": tracker.staleness})
