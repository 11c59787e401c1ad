"""WebAgent-R1: Wei et al. 2025, "WebAgent-R1: Training Web Agents via End-to-End Multi-Turn Reinforcement Learning",
M-GRPO.

    L = - 1/G sum over rollouts of 1/T sum over its T turns of 1/|a_t| sum over the reply's tokens of rho A
    A = (R - mean) / (std + 1e-6) of the group, for every turn

so turns count alike, whatever their lengths. Older observations are rewritten on the way, so a rollout may be several
rows; they share its advantage. The equation is given from memory of the paper, without its KL term (`loss.kl`).
Behaviour cloning comes first: an `sft` export of demonstrations.
"""

from __future__ import annotations

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe


class WebAgentR1(Recipe):
    settings = {"loss": {"normalise": "rollout"}}
    needs = ("turns",)

    def credit(self, step: Step) -> Credit:
        sizes = np.array([len(turn.places) for turn in step.turns], np.float64)
        tokens, turns = np.bincount(step.turn_rollouts, sizes), np.bincount(step.turn_rollouts)
        shares = tokens[step.turn_rollouts] / (turns[step.turn_rollouts] * sizes)
        return super().credit(step).weighted(step.spread_turns(shares))
