"""ART on leased groups: its trajectory groups, packing, loss and log.

Each trained run is a `Choice` with the engine's ids and log-probs, so no template is rendered. `scale_rewards=False`
in `options` is Dr. GRPO's. Text after the last trained token is left out. A restart first gives the engines ART's
checkpoint.
"""

import os
from pathlib import Path

import art
from transformers import AutoTokenizer

from rolltap.trainer_client.adapters.art_groups import ArtSettings, ArtTrainer
from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed


async def train(model: art.TrainableModel, backend: art.Backend, steps: int) -> None:
    """`model` is registered with `backend`."""
    out, tokenizer = Path(os.environ["OUT"]), AutoTokenizer.from_pretrained(model.base_model)
    settings = FeedSettings(policy="tiny", groups=8, through=out / "weights")
    url, key = os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"]
    feed = open_feed(url, key, settings, trainer="art", out=out)
    chosen = ArtSettings(vocabulary=len(tokenizer), steps=steps, options={"loss_fn": "ppo"})
    await ArtTrainer(model, backend, feed, chosen, tokenizer).train()
