"""ArCHer: Zhou et al. 2024, "ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL"; as in its code.

An utterance critic over a token actor. With o what a turn's prompt shows, a its reply, r_t the turn's rewards and bars
for target networks that follow by `tau` a step, for each twin k of two:

    Q_k(o, a) -> r + gamma V̄_k(o')        0 for V̄ after the last turn        V_k(o) -> Q̄_k(o, a~pi)
    A = min(Q_1, Q_2) - min(V_1, V_2), by REINFORCE on all tokens of a~pi

Q learns from replayed groups too; V and the actor from fresh ones, whose replies are samples of the policy. (The paper
samples a new reply at each replayed observation instead.) The actor rests for the first `warm_up` steps.
The critic is four linear heads on the policy's last hidden state: V reads the prompt's end, Q the state before the
reply's last token. Heads begin at 0, so the twins differ by what they see: each learns from half of the turns, drawn by
step. Actor and critic take their steps together, not 3 and 50 times an iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from rolltap.contract.trainer import Replay
from rolltap.trainer_client.data.step import POLICY, Credit, Pass, ReadNetwork, Step, ValueHead
from rolltap.trainer_client.recipes.base import ReplayedGroups
from rolltap.trainer_client.recipes.critic import CriticRecipe, with_turn_targets


@dataclass
class ArCHer(CriticRecipe):
    needs = ("turns",)
    heads = {name: ValueHead(lr=1e-3) for name in ("q1", "q2", "v1", "v2")}
    value_clip: float = inf
    gamma: float = 0.95
    tau: float = 0.1
    groups: int = 4
    warm_up: int = 20

    def replay(self, step: int) -> ReplayedGroups:
        return ReplayedGroups(self.groups, Replay(min_age=1, order="random"))

    def networks(self) -> Mapping[str, ReadNetwork]:
        return {"target": ReadNetwork(decay=1 - self.tau)}

    def passes(self, step: Step) -> Mapping[str, Pass]:
        return {POLICY: Pass(), "target": Pass("target")}

    def credit(self, step: Step) -> Credit:
        own, target = step.readings[POLICY].values, step.readings["target"].values
        fresh = np.array([not step.rollouts[turn.rollout].replayed for turn in step.turns], bool)
        last = [-1] * len(step.turns)
        quality = np.minimum(step.read_turns(own["q1"], last), step.read_turns(own["q2"], last))
        value = np.minimum(step.read_turns(own["v1"]), step.read_turns(own["v2"]))
        credit = step.broadcast_turns((quality - value) * fresh * (step.number > self.warm_up))
        drawn = np.random.default_rng(step.number).random(len(step.turns)) < 0.5
        for q, v, seen in (("q1", "v1", drawn), ("q2", "v2", ~drawn)):
            credit = with_turn_targets(credit, step, q, self.q_targets(step, target[v]), last, 2.0 * seen)
            expected = step.read_turns(target[q], last)
            credit = with_turn_targets(credit, step, v, expected, shares=2.0 * seen * fresh)
        return credit

    def q_targets(self, step: Step, values: tuple[np.ndarray, ...]) -> np.ndarray:
        """[T] r + gamma V̄(o'): with gamma .9, r 0 and V̄ .6 → .54; r alone at a rollout's last turn."""
        following = np.zeros(len(step.turns))
        for sequence in step.sequences():
            following[sequence[:-1]] = step.read_turns(values)[sequence[1:]]
        return step.with_outcome() + self.gamma * following
