"""SLEA-RL: Wang and Jiang 2026, "SLEA-RL: Step-Level Experience Augmented Reinforcement Learning for Multi-Turn Agentic
Training", its advantages.

    A_t = A_GRPO + weight * A_step        A_step: G_t = sum of gamma^(k-t) r_k, (G - mean) / (std + 1e-6) in its cluster

A cluster are the turns of a group whose observations are alike: `likeness` is the share of tokens that two have in
common, in order (2 M / T, difflib's ratio; the paper's is of text). A turn joins the first cluster whose first member
is like it; alone it has A_step 0. gamma is ours. KL .01, groups of 8. The library of experiences, and what of it each
prompt is given, are the agent's: in the record that is context, and carries no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import normalise, returns


@dataclass
class SLEARL(Recipe):
    settings = {"loss": {"kl": 0.01}}
    needs = ("turns",)
    gamma: float = 0.95
    weight: float = 1.0
    likeness: float = 0.85

    def credit(self, step: Step) -> Credit:
        to_go = returns(step.with_outcome(), step.sequences(), self.gamma)
        overall = normalise(step.rewards, step.groups)[step.turn_rollouts]
        return step.broadcast_turns(overall + self.weight * normalise(to_go, self.clusters(step)))

    def clusters(self, step: Step) -> np.ndarray:
        """[T] The cluster that each turn is in."""
        firsts: list[tuple[int, list[int]]] = []
        situations = np.zeros(len(step.turns), np.int64)
        for number, (turn, group) in enumerate(zip(step.turns, step.turn_groups.tolist(), strict=True)):
            observed = turn.observed.tolist()
            matches = (
                index for index, (other, first) in enumerate(firsts) if other == group and self.like(first, observed)
            )
            situations[number] = next(matches, len(firsts))
            if situations[number] == len(firsts):
                firsts.append((group, observed))
        return situations

    def like(self, one: list[int], other: list[int]) -> bool:
        """Six of seven tokens in common: .857, alike; five of six: .833, not."""
        return SequenceMatcher(None, one, other, autojunk=False).ratio() >= self.likeness
