"""MUA-RL: Zhao et al. 2025, "MUA-RL: Multi-turn User-interacting Agent Reinforcement Learning for Agentic Tool Use".

GRPO with a simulated user in the rollout: a role with a frozen policy, whose calls are context and carry no loss, as
little as tools' answers do. Groups of 8 at temperature 1, 32 a step; the reward is the task's, at the end.
"""

from __future__ import annotations

from rolltap.trainer_client.recipe import Recipe


class MUARL(Recipe):
    settings = {"groups": 32}
