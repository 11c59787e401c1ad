"""SSP: Lu et al. 2025, "Search Self-play: Pushing the Frontier of Agent Capability without Supervision".

Solvers play in groups, with GRPO's advantage. A proposer makes one question a group, and earns by how hard it was:

    group of several: A = (R - mean) / (std + 1e-6)        group of one: A = R
    proposer: R = 1 - a, or 4 a (1 - a) where 0 < a < 1; 0 for no question        a = accuracy of the solvers

So both train in one run. The proposer's rollout gets its reward late, when its question was played: see
`proposer_reward`. Filtering questions by their documents is the harness's.
"""

from __future__ import annotations

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import normalise


class SSP(Recipe):
    def credit(self, step: Step) -> Credit:
        alone = np.bincount(step.groups)[step.groups] == 1
        return step.broadcast(np.where(alone, step.rewards, normalise(step.rewards, step.groups)))


def proposer_reward(accuracy: float | None, *, curve: bool = False) -> float:
    """What a question earns that solvers got right with `accuracy` (None: no question). .4 → .6, as a curve .96."""
    if accuracy is None:
        return 0.0
    return 4 * accuracy * (1 - accuracy) if curve else 1 - accuracy
