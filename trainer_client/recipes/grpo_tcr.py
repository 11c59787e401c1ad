"""GRPO-TCR: Yu et al. 2025, "Demystifying Reinforcement Learning in Agentic Reasoning".

GRPO with the token mean (T), the higher upper clip (C, 0.28) and a penalty on overlong rollouts (R, buffer 4,096), and
groups of equal rewards replaced. Set `loss.overlong_limit` to the token limit of a rollout.
"""

from __future__ import annotations

from rolltap.trainer_client.recipe import Recipe


class GRPOTCR(Recipe):
    settings = {"loss": {"normalise": "token", "clip_high": 0.28, "drop_zero_variance": True, "overlong_buffer": 4096}}
