"""DART: "DART-GUI: Decoupled Asynchronous RL Training".

    L_t = min(pi_old / mu, 1) * clipped gain        pi_old: the trainer's own log-probs when the step began
    only the `share` of a group's turns with the highest mean entropy carry loss
    stored groups of hard tasks come back, of which only the successes (reward >= `success`) carry loss

A is GRPO's within the stored group. A task is hard where its group's mean reward is at most `hard`. The paper gives
neither the share nor the bounds; the released trainer has the entropy filter switched off, which is `share` = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rolltap.contract.trainer import Replay
from rolltap.trainer_client.data.step import POLICY, Credit, Step, StepRollout
from rolltap.trainer_client.recipes.base import Recipe, ReplayedGroups


@dataclass
class DART(Recipe):
    settings = {"loss": {"correction": "truncated", "importance_cap": 1.0}}
    needs = ("turns",)
    reads_policy = True
    share: float = 0.8
    groups: int = 1
    hard: float = 0.3
    success: float = 1.0
    age: int = 20

    def replay(self, step: int) -> ReplayedGroups | None:
        """Groups with a success and a mean of at most `hard`; 0 `groups`: none."""
        some = Replay(min_age=1, max_age=self.age, min_reward=1e-9, max_reward=self.hard, order="random")
        return ReplayedGroups(self.groups, some) if self.groups else None

    def admits_rollout(self, rollout: StepRollout) -> bool:
        return not rollout.replayed or rollout.reward >= self.success

    def credit(self, step: Step) -> Credit:
        entropies = step.over_turns(step.readings[POLICY].entropy)
        return super().credit(step).weighted(step.spread_turns(self.kept(step, entropies)))

    def kept(self, step: Step, entropies: np.ndarray) -> np.ndarray:
        """[T] 1 for the turns that carry loss: of five turns of a group with share .5 the three of most entropy."""
        kept = np.zeros(len(entropies))
        for group in np.unique(step.turn_groups):
            own = np.flatnonzero(step.turn_groups == group)
            count = math.ceil(self.share * len(own))
            kept[own[np.argsort(-entropies[own], kind="stable")[:count]]] = 1
        return kept
