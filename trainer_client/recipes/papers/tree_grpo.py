"""Tree-GRPO: Ji et al. 2025, "Tree Search for LLM Agent Reinforcement Learning", arXiv 2509.21240: trees of forks.

    A_i = (R_i - mean) / (std + 1e-6) over its group + the same over its tree

A tree is a rollout with all that was forked from it or from its forks. The sum is the released estimator `tree`; there
rollouts repeat what they share, each with its own A. Here, as in recipe `arpo`, a token is trained once, with
their mean and a weight. Where to fork is the harness's choice: at turns, in the paper.
"""

from __future__ import annotations

from rolltap.trainer_client.data.step import Step
from rolltap.trainer_client.recipes.estimators import Numbers, keyed, normalise
from rolltap.trainer_client.recipes.papers.arpo import ARPO


class TreeGRPO(ARPO):
    settings = {"loss": {"kl": 0.001}}

    def estimated(self, step: Step) -> Numbers:
        trees = keyed(step.groups, [rollout.root or rollout.id for rollout in step.rollouts])
        return super().estimated(step) + normalise(step.rewards, trees)
