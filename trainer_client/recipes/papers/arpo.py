"""ARPO: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv 2507.19849: credit over forked rollouts.

    A_i  = (R_i - mean) / (std + 1e-6) of the group, forks included
    A_t  = 1/d sum of A_i over the d rollouts that contain token t       (its own, and the forks that begin behind it)
    loss = - sum over tokens of d rho_t A_t                              (the paper's sum over whole rollouts)

so a shared beginning is paid by what all its continuations earned, and a fork's own tokens by its own reward. A token
is sampled and trained once, in its own rollout; d is its weight there (`loss.normalise` counts it once). Without forks
it is GRPO. Where to fork is the harness's choice: the paper forks where the entropy rises after a tool's answer. The
equations are given from memory of the paper.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import Numbers, normalise


class ARPO(Recipe):
    def credit(self, step: Step) -> Credit:
        """A = [1, -1], a fork (-1) behind the first token of a reply of two: its tokens get [0, 1], weights [2, 1]."""
        advantages = self.estimated(step)
        sums, weights = over_forks(step, advantages)
        own = step.broadcast(advantages).advantages
        shared = ((mine + total) / (count + 1) for mine, total, count in zip(own, sums, weights, strict=True))
        return Credit(tuple(row.astype(np.float32) for row in shared)).weighted([count + 1 for count in weights])

    def estimated(self, step: Step) -> Numbers:
        """[R] What each rollout's own tokens are paid."""
        return normalise(step.rewards, step.groups)


def over_forks(step: Step, values: Numbers) -> tuple[list[Numbers], list[Numbers]]:
    """Of each token, the sum of `values` [R] of the other rollouts that contain it, and how many these are."""
    sums, counts = ([np.zeros(len(row.segment)) for row in step.rows] for _ in range(2))
    forks = _forks(step)
    for turn in step.turns:
        start = next(span.start for span in step.rows[turn.row].segment.turns if span.call_id == turn.call_id)
        for rollout, length in forks.get(turn.call_id, {}).items():
            shared = turn.places[turn.places < start + length]
            sums[turn.row][shared] += values[rollout]
            counts[turn.row][shared] += 1
    return sums, counts


def _forks(step: Step) -> dict[str, dict[int, int]]:
    """By call id, the other rollouts that contain it, each with the number of its tokens there."""
    forks: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for row in step.rows:
        for span in row.segment.turns:
            if span.sampled_by:
                forks[span.call_id][row.rollout] = span.end - span.start
    return forks
