"""OpenEnv's sessions under the contract suite, taken apart by TRL's own rollout loop."""

from __future__ import annotations

import numpy as np
from openenv.core.harness import TrainableSession, TrainingTrace  # type: ignore[import-not-found]
from transformers import AutoTokenizer
from trl.experimental.async_grpo.async_rollout_worker import _chain_to_sequences
from trl.experimental.async_grpo.openenv_harness import _turns_from_training_trace

from rolltap.trainer_client.adapters.openenv_sessions import LeasedSessionFactory, SessionSettings

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import Run, Seen, TrainedToken, tokens_of

GENERATIONS = 4
"""Of the five rollouts of a group of world.py one is unscorable."""


class OpenEnvSessions:
    spends_steps = True
    normalise, advantage = "token", "dr_grpo"

    def run(self, run: Run) -> Seen:
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        settings = SessionSettings("policy", GENERATIONS, VOCABULARY, tokenizer, wait=0.2)
        factory = LeasedSessionFactory(run.url, KEY, settings, "a-run", sampling={"temperature": 1.0})
        seen: list[TrainedToken] = []
        for seed in range(run.groups * run.steps):
            sessions = [factory.create([], seed=seed) for _ in range(GENERATIONS)]
            for session in sessions:
                assert isinstance(session, TrainableSession)
                assert session.wait_for_completion() == 0
                trace = session.fetch_training_trace()
                trace = TrainingTrace.model_validate_json(trace.model_dump_json())
                assert session.verify([]).env_reward is not None
                for row in _chain_to_sequences(_turns_from_training_trace(trace), "rollout", 0)[0]:
                    seen += tokens_of(
                        np.array(row.input_ids), np.array(row.completion_mask), np.array(row.old_log_probs)
                    )
                session.close()
        return Seen([seen], {}, {})
