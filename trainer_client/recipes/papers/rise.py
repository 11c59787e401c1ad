"""RISE: Qu et al. 2024, "Recursive Introspection: Teaching Language Model Agents How to Self-Improve".

    L = - sum over the turns kept of exp(r_t / temperature) log pi(reply)        no ratio, no baseline

Of the turns of a group that were shown the same tokens, the best one is kept: a rollout group is then several samples
of a state. Equal replies are kept once. r_t is the turn's own reward plus the rollout's at the last turn. (The released
trainer multiplies by the stored reward itself; the paper's equation is the one here.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import keyed

if TYPE_CHECKING:
    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.loss import PolicyLoss, Terms
    from rolltap.trainer_client.model.network import Predictions


@dataclass
class RISE(Recipe):
    needs = ("turns",)
    temperature: float = 1.0

    def credit(self, step: Step) -> Credit:
        rewards = step.with_outcome()
        segments = [step.rows[turn.row].segment for turn in step.turns]
        shown = (part.token_ids[: turn.places[0]].tobytes() for part, turn in zip(segments, step.turns, strict=True))
        states = keyed(step.turn_groups, shown)
        is_best = np.zeros(len(step.turns))
        for state in np.unique(states):
            own = np.flatnonzero(states == state)
            is_best[own[np.argmax(rewards[own])]] = 1.0
        return step.broadcast_turns(np.exp(rewards / self.temperature)).weighted(step.spread_turns(is_best))

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        likelihood = (predicted.logprobs_M * batch.advantages_M * batch.weights_M).sum()
        return replace(policy_loss(predicted, batch), loss=-likelihood)
