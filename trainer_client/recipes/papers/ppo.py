"""PPO with GAE: Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; Schulman et al. 2016 for GAE (eq. 16).

    delta_k = r_k + gamma V_(k+1) - V_k        A_k = delta_k + gamma lam A_(k+1)        target_k = A_k + V_k
    L = clipped policy gradient on whitened A + 1/2 max((V - target)^2, (clip(V) - target)^2)

over a rollout's trained tokens in the order of its calls; what tools and users wrote is no step. A turn's own reward
stands at its last token, the rollout's at the last of all. The critic is a linear head on the policy's last hidden
state, which it does not move; implementations with a critic network of its own train that by the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.data.step import POLICY, Credit, Step, ValueHead
from rolltap.trainer_client.recipes.critic import CriticRecipe, with_targets
from rolltap.trainer_client.recipes.estimators import gae, whiten_rows


@dataclass
class PPO(CriticRecipe):
    needs = ("turns",)
    reads_policy = True
    heads = {"value": ValueHead(lr=1e-4)}
    gamma: float = 1.0
    lam: float = 1.0

    def credit(self, step: Step) -> Credit:
        before = step.readings[POLICY].values["value"]
        advantages, targets = ([np.zeros_like(row) for row in before] for _ in range(2))
        rewards = step.with_outcome()
        for sequence in step.sequences():
            turns = [step.turns[number] for number in sequence]
            values = np.concatenate([before[turn.row][turn.places] for turn in turns])
            ends = np.cumsum([len(turn.places) for turn in turns])
            earned = np.zeros(len(values))
            earned[ends - 1] = rewards[sequence]
            estimated = gae(earned, values, self.gamma, self.lam)
            for turn, advantage in zip(turns, np.split(estimated, ends[:-1]), strict=True):
                advantages[turn.row][turn.places] = advantage
                targets[turn.row][turn.places] = advantage + before[turn.row][turn.places]
        masks = [row.segment.loss_mask for row in step.rows]
        credit = Credit(tuple(whiten_rows(advantages, masks)))
        return with_targets(credit, "value", before, tuple(targets), tuple(mask.astype(np.float32) for mask in masks))
