"""verl's trainer (v1, on TransferQueue) on leased groups: its actor, loss, optimiser, checkpoints and metrics.

`algorithm.adv_estimator`: `grpo` or `rloo`, over rollouts. `rollout_correction`: `bypass_mode=true` (ratio to the
engine's log-probs) or `rollout_is`. `loss_agg_mode`: `token-mean`. `ppo_mini_batch_size` and `train_batch_size` are
not used: a lease is a mini-batch. Groups are acknowledged when they are leased; weights leave by a checkpoint engine
`rolltap`. Refused or not used: critics, KL in the reward, validation, asynchronous modes, LoRA without `merge`,
several mini-batches a step.
"""

import os
from pathlib import Path

from hydra import compose, initialize_config_module

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.verl_trainer import train

out = Path(os.environ["OUT"])
settings = FeedSettings(policy="tiny", groups=2, through=out / "weights")
feed = open_feed(
    os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"], settings, trainer="verl", out=out
)
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={os.environ['MODEL']}",
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.n=1",
            "algorithm.adv_estimator=grpo",
            "algorithm.rollout_correction.bypass_mode=true",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.save_freq=1",
            f"trainer.total_training_steps={os.environ['STEPS']}",
            f"trainer.default_local_dir={out / 'checkpoints'}",
        ],
    )
train(config, feed)
