"""SkyRL's trainer on leased groups: after a step its policy is saved and pushed, in place of SkyRL's own weight sync.

A step can't be undone, so its groups are acknowledged before it. A run resumes from SkyRL's newest checkpoint; groups
of later steps are leased again.
"""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters.feed import Feed, write_version
from rolltap.trainer_client.adapters.skyrl_generator import LeasedGenerator  # first: it checks SkyRL's version
from rolltap.trainer_client.lease.push import prune
from rolltap.trainer_client.model.weights import whole_folder

from skyrl.train.trainer import RayPPOTrainer  # isort: skip
from skyrl.train.utils.callbacks import TrainingCallback  # isort: skip


class LeasedSkyRlTrainer(RayPPOTrainer):
    """SkyRL's trainer on `feed`, for a model of `vocabulary` tokens. `options`: what else SkyRL's is made with."""

    def __init__(self, feed: Feed, vocabulary: int, cfg: Any, **options: Any) -> None:
        check_settings(cfg, feed.settings.groups)
        self._feed, self._vocabulary = feed, vocabulary
        super().__init__(cfg=cfg, inference_engine_client=None, generator=LeasedGenerator(feed), **options)
        self.add_callback(Pushes(feed))

    async def train(self) -> None:
        with self._feed.leasing(self._vocabulary):
            await super().train()

    def init_weight_sync_state(self) -> None:
        """Turns SkyRL's weight sync off: the engines are the server's."""
        self.dispatch.save_weights_for_sampler = _no_sync


async def _no_sync() -> None:
    return None


def check_settings(cfg: Any, groups: int) -> None:
    """Raises `ConfigError` for settings of SkyRL's with which the rows would be trained otherwise than recorded."""
    trainer, generator = cfg.trainer, cfg.generator
    wanted = {
        "generator.step_wise_trajectories=true": generator.step_wise_trajectories,
        "generator.merge_stepwise_output=false": not generator.merge_stepwise_output,
        "trainer.algorithm.loss_reduction=token_mean": trainer.algorithm.loss_reduction == "token_mean",
        "trainer.algorithm.dynamic_sampling.type=null": trainer.algorithm.dynamic_sampling.type is None,
        "trainer.placement.colocate_all=false": not trainer.placement.colocate_all,
        "trainer.eval_interval=-1": trainer.eval_interval <= 0,
        f"trainer.train_batch_size={groups}": trainer.train_batch_size == groups,
    }
    if missing := [setting for setting, is_set in wanted.items() if not is_set]:
        raise ConfigError(f"SkyRL needs other settings to train on leases: {' '.join(missing)}")


class Pushes(TrainingCallback):
    """Connects at SkyRL's starting point, and pushes the policy after each step, within `feed.leasing(...)`."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def on_train_start(self, trainer: Any, callback_input: Any, control: Any) -> None:
        step = trainer.global_step
        self.feed.connect(self.feed.version_folder(step) if step else None, step, trainer.tokenizer)
        self.feed.serve(self._saved(trainer, self.feed.version))

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Before SkyRL's checkpoint of the step, which is complete without it."""
        version = self.feed.version + 1
        write_version(self.feed.version_folder(trainer.global_step), self.feed.settings.policy, version)
        folder = self._saved(trainer, version)
        self.feed.push(folder, version)
        prune(folder.parent)

    def _saved(self, trainer: Any, version: int) -> Path:
        through = self.feed.settings.through
        if not isinstance(through, Path):
            raise ConfigError("SkyRL saves its policy in a folder: FeedSettings.through must be a folder")
        with whole_folder(through / f"version-{version}") as making:
            trainer.dispatch.save_hf_model("policy", str(making), trainer.tokenizer)
        return through / f"version-{version}"


class NoPrompts:
    """As many empty prompts as `steps` of `groups` take: SkyRL counts them, and the rollouts are recorded."""

    def __init__(self, steps: int, groups: int) -> None:
        self._count = steps * groups

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": [], "env_class": "", "env_extras": {}, "uid": str(index)}

    collate_fn = staticmethod(list)
