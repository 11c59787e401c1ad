"""TRL's AsyncGRPOTrainer on leased groups, with TRL's tree packing, which computes shared prefixes once.

`recipe` is one of rolltap's that gives a rollout one advantage. `model_version` and `sample/staleness_max` are in
TRL's log. Its data loader, worker and queue are replaced, since they hide which groups a step has. Without CUDA, SDPA
replaces FlashAttention 3. Refused: `token_budget`, `weight_sync_steps` above 1, several processes.
"""

import os
from pathlib import Path

import torch
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.trl_async import LeasedAsyncGRPOTrainer

model, out = os.environ["MODEL"], Path(os.environ["OUT"])
settings = FeedSettings(policy="tiny", groups=2, through=out / "weights")
gpu = torch.cuda.is_available()
url, key = os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"]
trainer = LeasedAsyncGRPOTrainer(
    model,
    AsyncGRPOConfig(
        output_dir=str(out), max_steps=int(os.environ["STEPS"]), save_steps=1, report_to=[], use_cpu=not gpu, bf16=gpu
    ),
    open_feed(url, key, settings, trainer="trl", out=out),
    processing_class=AutoTokenizer.from_pretrained(model),
    recipe="grpo",
)
trainer.train()
