"""AstraFlow: GRPO by dataflow over several policies: bounded staleness, replay, a barrier of versions.

    groups with a token of a version under current - 8 are dropped        `max_staleness` = 8
    `groups` stored ones of at most `age` versions come back in every step
    no new rollout begins between the steps of its policies               the server's `queue.barrier`

A run for each policy; each has its own groups of the shared rollouts, its own bound and its own replay. The project's
documents give the bound, not the share of replayed groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.contract.trainer import Replay
from rolltap.trainer_client.recipes.base import Recipe, ReplayedGroups


@dataclass
class AstraFlow(Recipe):
    settings = {"max_staleness": 8}
    groups: int = 1
    age: int = 8

    def replay(self, step: int) -> ReplayedGroups | None:
        """Stored groups in random order; 0 `groups`: none."""
        some = Replay(min_age=1, max_age=self.age, order="random")
        return ReplayedGroups(self.groups, some) if self.groups else None
