"""NeMo RL's `Policy` and loss on leased groups: a segment is a message log.

`user` is context, `assistant` trained tokens. `multiple` is data-parallel size times micro batch. Without
`token_level_loss` a row's `sample_mask` is its share of the rollout. A row over `longest` tokens refuses its group.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.nemo_rl_policy import NemoSettings, NemoTrainer


def train(
    make_policy: Callable[[Path | None], Any], weights_of: Callable[[Path | None], Path], loss: Any, logger: Any
) -> None:
    """`loss` is a `ClippedPGLossFn`, `logger` NeMo RL's.

    `make_policy` builds NeMo RL's `Policy`; if it gets a checkpoint's folder, from the `weights` and `optimizer` in it.
    `weights_of` returns a folder in Hugging Face's form: the model for None, else the output of `convert_dcp_to_hf` for
    the checkpoint's `weights`.
    """
    out, tokenizer = Path(os.environ["OUT"]), AutoTokenizer.from_pretrained(os.environ["MODEL"])
    settings = FeedSettings(policy="tiny", groups=8, through=out / "weights")
    url, key = os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"]
    feed = open_feed(url, key, settings, trainer="nemo-rl", out=out)
    chosen = NemoSettings(steps=100, vocabulary=len(tokenizer), longest=32768, tokenizer=tokenizer, multiple=8)
    NemoTrainer(feed, chosen, make_policy, loss, weights_of, logger.log_metrics).train()
