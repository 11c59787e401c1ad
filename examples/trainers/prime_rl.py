"""Fills the step files of prime-rl's trainer from leased groups, in its orchestrator's place, one step at a time.

prime-rl packs them; its mean is over the step's tokens. A segment over `seq_len` refuses its group, and so does
another temperature than the policy's. Step files after the newest checkpoint are removed at a restart.
"""

import os
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.prime_rl_files import LeasedOrchestrator, PrimeSettings


def send(output_dir: Path, model: Path, steps: int, ranks: int) -> None:
    """`output_dir`, `steps` and `ranks` are the trainer's. Start it before `uv run trainer`.

    That has `rollout_transport.type` and `weight_broadcast.type` "filesystem", the same `output_dir`, `model.seq_len`
    and `max_steps`, and `--resume` when it is started again.
    """
    out = Path(os.environ["OUT"])
    settings = FeedSettings(policy="tiny", groups=8, through=out / "weights")
    url, key = os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"]
    feed = open_feed(url, key, settings, trainer="prime-rl", out=out)
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    chosen = PrimeSettings(output_dir, 32768, steps, model, vocabulary, ranks=ranks)
    LeasedOrchestrator(feed, chosen, AutoTokenizer.from_pretrained(model)).run()
