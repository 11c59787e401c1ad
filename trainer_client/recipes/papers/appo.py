"""APPO: Wang et al. 2026, "APPO: Agentic Procedural Policy Optimization", arXiv 2606.12384: forks inside replies.

    A_i  = (R_i - mean) / (std + 1e-6)      over a group's first rollouts, and over their forks apart (ddof 0)
    A_t  = A_i + mean of A_j over the forks j that contain token t
    A'_t = A_t (1 + weight f_t)             f_t = exp(sum over k >= t of g^(k - t) d_k) within [1, 1 + limit]

d_k is log pi - log mu of the rollout's k-th trained token, pi by the weights before the step and mu by the engine's; 0
if over log 3. g halves over `half_life` tokens. Forks carry no loss: they say what their beginning is worth. Where to
fork, by the branching score, is the harness's. From the released code, which computes f anew in each minibatch; without
its bound on f of tokens with A < 0 and a ratio over 6, its filter of replies with two tokens past the dual clip,
and its factor on rewards before a fork, which meets none, as a reward stands at the rollout's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np

from rolltap.trainer_client.data.step import POLICY, Credit, Step, StepRollout
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import discounted, keyed, normalise
from rolltap.trainer_client.recipes.papers.arpo import over_forks


@dataclass
class APPO(Recipe):
    settings = {"loss": {"normalise": "token", "clip_high": 0.28, "clip_dual": 3.0, "kl": 0.001}}
    needs = ("turns",)
    reads_policy = True
    weight: float = 1.0
    limit: float = 0.2
    half_life: float = 64.0

    def admits_rollout(self, rollout: StepRollout) -> bool:
        return not rollout.root

    def credit(self, step: Step) -> Credit:
        kinds = keyed(step.groups, [bool(rollout.root) for rollout in step.rollouts])
        advantages = normalise(step.rewards, kinds, ddof=0)
        sums, counts = over_forks(step, advantages)
        own = step.broadcast(advantages).advantages
        shared = [mine + total / np.maximum(count, 1) for mine, total, count in zip(own, sums, counts, strict=True)]
        gains = [
            np.where(logprobs - row.segment.logprobs > log(3), 0, logprobs - row.segment.logprobs)
            for row, logprobs in zip(step.rows, step.readings[POLICY].logprobs, strict=True)
        ]
        for sequence in step.sequences():
            turns = [step.turns[number] for number in sequence]
            future = discounted(
                np.concatenate([gains[turn.row][turn.places] for turn in turns]), 0.5 ** (1 / self.half_life)
            )
            scales = 1 + self.weight * np.exp(future).clip(1, 1 + self.limit)
            ends = np.cumsum([len(turn.places) for turn in turns])
            for turn, scale in zip(turns, np.split(scales, ends[:-1]), strict=True):
                shared[turn.row][turn.places] *= scale
        return Credit(tuple(row.astype(np.float32) for row in shared))
