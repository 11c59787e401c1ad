"""Checks which of verl's configuration works with leased batches, and sets the folder for weights."""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import open_dict

from rolltap.errors import ConfigError
from rolltap.extras import page
from rolltap.trainer_client.adapters.feed import Feed
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.recipes.base import Recipe

RECIPES = {("grpo", True): "grpo", ("grpo", False): "dr_grpo", ("rloo", True): "rloo", ("rloo", False): "rloo"}
"""Our recipe for each `algorithm.adv_estimator` and `norm_adv_by_std_in_grpo` of verl."""

WEIGHTS = "rolltap.trainer_client.adapters.verl_weights"


def recipe_of(config: Any) -> Recipe:
    """The recipe that replaces verl's advantage estimator."""
    return make_recipe(RECIPES[_estimator(config)], {})


def _estimator(config: Any) -> tuple[str, bool]:
    return str(config.algorithm.adv_estimator), bool(config.algorithm.norm_adv_by_std_in_grpo)


def prepare(config: Any, feed: Feed) -> None:
    """Enables TransferQueue and sets the folder to which verl's workers write weights."""
    with open_dict(config):
        config.transfer_queue.enable = True
        engine = config.actor_rollout_ref.rollout.checkpoint_engine
        engine.backend, engine.custom_backend_module = "rolltap", WEIGHTS
        engine.engine_kwargs = {"rolltap": {"folder": str(weights_folder(feed).absolute())}}


def weights_folder(feed: Feed) -> Path:
    if not isinstance(feed.settings.through, Path):
        raise ConfigError("verl's weights go through a folder: FeedSettings(through=Path(...))")
    return feed.settings.through


def check_arguments(config: Any) -> None:
    """Raises `ConfigError` for settings that would train other tokens, weights or ratios than the recorded ones, or
    not use them."""
    actor, algorithm, trainer = config.actor_rollout_ref.actor, config.algorithm, config.trainer
    correction = algorithm.get("rollout_correction") or {}
    lora = max(config.actor_rollout_ref.model.get("lora_rank", 0), config.actor_rollout_ref.model.lora.get("rank", 0))
    unusable = {
        "algorithm.adv_estimator": _estimator(config) not in RECIPES,
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.rollout_correction": not (correction.get("bypass_mode") or correction.get("rollout_is")),
        "actor_rollout_ref.actor.loss_agg_mode": actor.loss_agg_mode != "token-mean",
        "actor_rollout_ref.rollout.n": config.actor_rollout_ref.rollout.n != 1,
        "actor_rollout_ref.model.lora": lora > 0 and not config.actor_rollout_ref.model.lora.get("merge"),
        "trainer.v1.trainer_mode": trainer.v1.trainer_mode != "sync",
        "trainer.val_before_train": trainer.get("val_before_train", True),
        "trainer.test_freq": trainer.test_freq > 0,
        "trainer.total_training_steps": trainer.total_training_steps is None,
    }
    for name, wrong in unusable.items():
        if wrong:
            raise ConfigError(f"{name} as it is set can't be used with leased groups: {page('trainers')}")
