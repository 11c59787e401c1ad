"""OpenEnv sessions for TRL's HarnessRolloutWorker: rollouts that any harness made.

A trained run of a segment is a turn, a group a seed of TRL's. Groups of more rollouts than `generations` are refused;
smaller ones leave TRL generations without a reward. A group is acknowledged with its last session (closing it waits
for a server that is away), so groups that a killed trainer had queued are lost, and TRL's log counts staleness from
the session's start. `AsyncGRPOTrainer` avoids both.
"""

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
