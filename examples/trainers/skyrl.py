"""SkyRL's training loop on leased groups, in its step-wise rows.

It needs `generator.step_wise_trajectories=true`, `trainer.placement.colocate_all=false` and
`trainer.eval_interval=-1`. `policy_loss_type=rollout_is` compares with the engine's log-probs; `regular`, the
default, computes them anew. Keep OUT and SkyRL's checkpoints together.
"""

import os
from pathlib import Path
from typing import Any

from skyrl.train.entrypoints.main_base import BasePPOExp

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.skyrl_trainer import LeasedSkyRlTrainer, NoPrompts


class LeasedExperiment(BasePPOExp):
    """Run it where SkyRL's entry point runs `BasePPOExp`."""

    def get_train_dataset(self) -> Any:
        return NoPrompts(self.cfg.trainer.max_training_steps, self.cfg.trainer.train_batch_size)

    def get_inference_client(self) -> None:
        return None

    def get_generator(self, *_: Any) -> None:
        return None

    def get_trainer(self, cfg: Any, **made: Any) -> LeasedSkyRlTrainer:
        out = Path(os.environ["OUT"])
        settings = FeedSettings(policy="tiny", groups=cfg.trainer.train_batch_size, through=out / "weights")
        url, key = os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"]
        feed = open_feed(url, key, settings, trainer="skyrl", out=out)
        own = {name: made[name] for name in ("tracker", "tokenizer", "train_dataset", "colocate_pg")}
        return LeasedSkyRlTrainer(feed, len(self.tokenizer), cfg, **own)
