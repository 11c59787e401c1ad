"""OpenEnv sessions for TRL's HarnessRolloutWorker: rollouts that any harness made. See docs/trainers.md."""

import os
from functools import partial

from transformers import AutoTokenizer
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from rolltap.trainer_client.adapters.openenv_sessions import LeasedSessionFactory, SessionSettings

tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
settings = SessionSettings("tiny", generations=4, vocabulary=len(tokenizer), tokenizer=tokenizer)
url, key = os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"]
factory = partial(LeasedSessionFactory, url, key, settings, "my-run")
worker = partial(HarnessRolloutWorker, harness_session_factory=factory)  # and TRL's own arguments
