"""SPEAR: "Learn the Ropes, Then Trust the Wins: Self-imitation with Progressive Exploration for Agentic RL".

    fresh rollouts: A = R' - mean_g (Dr. GRPO)        R' = R + min(.1 calls, 1) (cos(pi t / explore) + 1) / 2
    replayed ones: A = R - median of the means of recent groups, kept where A > 0
    L = L_fresh + ramp(t) L_replayed        ramp(t) = (1 - cos(pi t / steps)) / 2

L_fresh and L_replayed are means over their own rollouts, in one optimiser step; the released code makes two. Replayed
groups are at most `age` versions old; the median is over the last `recent` groups. `calls` are the turns before a
rollout's last. The released script's covariance clip acts on one token in 5,000 and is left out. No KL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rolltap.contract.trainer import Replay
from rolltap.trainer_client.data.step import Credit, Step, StepRollout
from rolltap.trainer_client.recipes.base import Recipe, ReplayedGroups
from rolltap.trainer_client.recipes.estimators import Numbers, centre


@dataclass
class SPEAR(Recipe):
    settings = {"loss": {"normalise": "constant", "clip_high": 0.28}}
    groups: int = 4
    age: int = 5
    recent: int = 10_240
    steps: int = 300
    explore: int = 200
    bonus: bool = True
    means: list[float] = field(default_factory=list, init=False)

    def replay(self, step: int) -> ReplayedGroups:
        return ReplayedGroups(self.groups, Replay(min_age=1, max_age=self.age))

    def ramp(self, step: int) -> float:
        """After 0, 75, 150, 300 steps → 0, .146, .5, 1."""
        return (1 - math.cos(math.pi * min(step / self.steps, 1))) / 2

    def tool_bonus(self, calls: Numbers, step: int) -> Numbers:
        """What tool calls earn after `step` steps: 3 calls at 0 → .3, at half of `explore` → .15, from its end on 0."""
        return np.minimum(0.1 * calls, 1) * (math.cos(math.pi * min(step / self.explore, 1)) + 1) / 2

    def usual(self) -> float:
        """The median of the means of recent groups; 0 before the first."""
        return float(np.median(self.means)) if self.means else 0.0

    def admits_rollout(self, rollout: StepRollout) -> bool:
        return not rollout.replayed or rollout.reward > self.usual()

    def credit(self, step: Step) -> Credit:
        done, replayed = step.number - 1, np.array([rollout.replayed for rollout in step.rollouts], bool)
        calls = np.maximum(np.bincount(step.turn_rollouts, minlength=len(replayed)) - 1, 0)
        shaped = step.rewards + self.tool_bonus(calls, done) * self.bonus
        advantages = np.where(replayed, step.rewards - self.usual(), centre(shaped, step.groups))
        fresh = [float(step.rewards[step.groups == group].mean()) for group in np.unique(step.groups[~replayed])]
        self.means = [*self.means, *fresh][-self.recent :]
        trained = np.array([rollout.trained for rollout in step.rollouts], bool)
        shares = np.where(replayed, self.ramp(done), 1.0) * trained.sum()
        for kind in (replayed, ~replayed):
            shares[kind] /= max(1, (kind & trained).sum())
        return step.broadcast(advantages).weighted(step.broadcast(shares).advantages)
