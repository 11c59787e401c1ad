"""SeeUPO: "SeeUPO: Sequence-Level Agentic-RL with Convergence Guarantees".

    A = R - mean_g        s_t = exp(mean over the reply's tokens of log pi - log pi_old)        one clipped ratio a turn
    for t = T, ..., 1: one optimiser step on turn t, its advantage times s_(t+1) ... s_T by the weights updated so far

The order, the ratio a turn, and later ratios held within [1 - limit, 1 + limit] are those of the released settings
(`update_order`, `gspo`, `adv_updator`); that they are multiplied is heterogeneous-agent mirror learning's, which the
paper stands on. The released normalisation of A over the batch and KL term (.002) are left out. Turns are counted from
the rollout's first; a step makes as many optimiser steps as its longest rollout has turns. An update's loss is the mean
over its turns of the mean over their tokens (the released `seq-mean-token-mean`, where a sample is a turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.model.loss import sequence_ratio
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import centre

if TYPE_CHECKING:
    from torch import Tensor

    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.loss import PolicyLoss, Terms
    from rolltap.trainer_client.model.network import Predictions

MOST_TURNS = 1 << 20


def later_ratios(log_ratio_M: Tensor, units_M: Tensor) -> Tensor:
    """[M] The product of the ratios of later turns of the rollout: turns of 1.1 (the last), .9 and any → 1, 1.1, .99.

    `units_M` are rollout * MOST_TURNS + turn, `log_ratio_M` the same for all tokens of a turn.
    """
    units, index_M = units_M.unique(return_inverse=True)
    own = log_ratio_M.new_zeros(len(units)).index_copy(0, index_M, log_ratio_M)
    same = (units // MOST_TURNS).unsqueeze(1) == (units // MOST_TURNS).unsqueeze(0)
    later = same & (units.unsqueeze(0) > units.unsqueeze(1))
    return (later * own.unsqueeze(0)).sum(1).exp()[index_M]


@dataclass
class SeeUPO(Recipe):
    settings = {"loss": {"normalise": "rollout"}}
    needs = ("turns",)
    whole = True
    limit: float = 0.2

    def credit(self, step: Step) -> Credit:
        advantages = centre(step.rewards, step.groups)[step.turn_rollouts]
        return step.broadcast_turns(advantages).carrying(turn=step.spread_turns(step.turn_order))

    def updates(self, step: Step, credit: Credit) -> Sequence[Credit]:
        order = step.turn_order
        trained = np.array([rollout.trained for rollout in step.rollouts], bool)[step.turn_rollouts]
        tokens = np.array([rollout.tokens for rollout in step.rollouts], np.float64)[step.turn_rollouts]
        sizes = np.array([len(turn.places) for turn in step.turns], np.float64)
        whole = sum(rollout.trained for rollout in step.rollouts) * tokens / sizes  # undoes the rollout's share
        updates = []
        for turn in range(order.max(initial=0), 0, -1):
            own = (order == turn) & trained
            updates.append(credit.weighted(step.spread_turns(own * whole / max(1, own.sum()))))
        return updates

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        units_M = batch.rollouts_M * MOST_TURNS + batch.extra["turn"].long()
        ratio_M = sequence_ratio(predicted.logprobs_M.detach(), batch.logprobs_M, units_M)
        later_M = later_ratios(ratio_M, units_M).clamp(1 - self.limit, 1 + self.limit)
        by_turn = replace(batch, rollouts_M=units_M, advantages_M=batch.advantages_M * later_M)
        return replace(policy_loss, ratio="sequence")(predicted, by_turn)
