"""A Tinker service on leased groups, by the unmodified SDK.

TINKER_BASE_URL and TINKER_API_KEY name the service; TINKER_OUT is the folder of `rolltap tinker`, VOCABULARY the
number of the model's tokens. `loss` is `ppo`, `importance_sampling` or `cispo` (`dro` would train tokens without an
advantage). Advantages hold the mean over the step's tokens, as Tinker's losses are sums. `fetch` brings the sampler's
weights to a folder that engines see. A restart makes a client from the newest `save_state`; a group that was lost
before it was acknowledged costs no step.
"""

import os
from pathlib import Path

import tinker

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.tinker_service import TinkerSettings, TinkerTrainer
from rolltap.trainer_client.endpoint.saved import folder_of

base, out, kept = os.environ["MODEL"], Path(os.environ["OUT"]), Path(os.environ["TINKER_OUT"])
vocabulary = int(os.environ["VOCABULARY"])
service = tinker.ServiceClient()  # TINKER_BASE_URL, TINKER_API_KEY


def open_client(state: str | None) -> tinker.TrainingClient:
    if state is None:
        return service.create_lora_training_client(base, rank=32).result()
    return service.create_training_client_from_state_with_optimizer(state).result()


url, key = os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"]
settings = FeedSettings(policy="tiny", groups=2, through=out / "weights")
trainer = TinkerTrainer(
    open_client,
    open_feed(url, key, settings, trainer="tinker", out=out),
    TinkerSettings(vocabulary, steps=int(os.environ["STEPS"]), optimiser=tinker.AdamParams(learning_rate=1e-5)),
    fetch=lambda path: folder_of(kept, path),
)
trainer.train()
