"""DAPO: Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale".

GRPO's advantage with four changes, all of them settings: a wider upper clip (eq. 8: 0.2 and 0.28), groups whose rewards
are all equal replaced (dynamic sampling, eq. 11), the mean over all tokens (eq. 12), and a soft length penalty (eq. 13)

    0 up to limit - buffer        (limit - buffer - length) / buffer up to limit        -1 beyond

The paper's limit is 20,480 tokens; set `loss.overlong_limit` to the rollouts' own. No KL.
"""

from __future__ import annotations

from rolltap.trainer_client.recipe import Recipe


class DAPO(Recipe):
    settings = {
        "loss": {
            "normalise": "token",
            "clip_high": 0.28,
            "drop_zero_variance": True,
            "overlong_limit": 20_480,
            "overlong_buffer": 4096,
        }
    }
