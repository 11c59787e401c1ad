"""BranchGRPO: Li et al. 2025, "BranchGRPO: Stable and Efficient GRPO with Structured Branching in Diffusion Models".

    V(n) = mean R of the rollouts that contain node n       (its own, and the forks that begin behind it)
    A(n) = (V(n) - mean) / (std + 1e-6)                     over the group's nodes of the same depth

A node is a turn, or a part of one where forks begin inside it; its depth is the number of turns before it, an origin's
included. So early turns are compared with early ones, late with late ones, and a depth with one node gets 0. A token is
trained once, in its own rollout. The paper branches denoising steps; here they are turns of agents, all leaves weigh
alike (its weights by path probability are left out), and nothing is pruned. The equations are given from memory.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step, StepTurn
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import keyed, normalise
from rolltap.trainer_client.recipes.papers.arpo import over_forks


class BranchGRPO(Recipe):
    needs = ("turns",)

    def credit(self, step: Step) -> Credit:
        """R = [1, 0], both of one turn behind a shared first one: V = .5 alone at depth 0 → 0; [1, 0] → ±.707."""
        sums, counts = over_forks(step, step.rewards)
        nodes = [
            (turn, places)
            for turn in step.turns
            for places in np.split(turn.places, np.flatnonzero(np.diff(counts[turn.row][turn.places])) + 1)
        ]
        values = np.array(
            [
                (step.rewards[turn.rollout] + sums[turn.row][places[0]]) / (counts[turn.row][places[0]] + 1)
                for turn, places in nodes
            ]
        )
        groups = [step.rollouts[turn.rollout].group for turn, _ in nodes]
        keys = keyed(groups, [turn.agent for turn, _ in nodes], [depth(step, turn) for turn, _ in nodes])
        advantages = [np.zeros(len(row.segment), np.float32) for row in step.rows]
        for (turn, places), advantage in zip(nodes, normalise(values, keys), strict=True):
            advantages[turn.row][places] = advantage
        return Credit(tuple(advantages))


def depth(step: Step, turn: StepTurn) -> int:
    """The turns before this one. A fork inside a reply goes on with the same turn, whose parts are two calls without a
    prompt between them, before all that the fork's rollout sampled behind them."""
    spans = step.rows[turn.row].segment.turns
    return turn.index - sum(before.end == span.start for before, span in pairwise(spans))
