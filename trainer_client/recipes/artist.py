"""ARTIST: Singh et al. 2025, "Agentic Reasoning and Tool Integration for LLMs via Reinforcement Learning".

GRPO on rewards of outcome, format and tool use that the evaluator adds up; the loss is the mean of the rollouts' means.
What tools answer is masked in the paper: in a record it never carries loss, since nobody sampled it.
"""

from __future__ import annotations

from rolltap.trainer_client.recipe import Recipe


class ARTIST(Recipe):
    settings = {"loss": {"normalise": "rollout"}}
