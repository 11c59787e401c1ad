"""InfoPO: "InfoPO: Information-Driven Policy Optimization for User-Centric Agents".

    r_info(t) = mean over the reply's tokens of log pi(token | feedback) - log pi(token | feedback masked)
    A_t = A_GRPO + beta z(r_info(t))        beta = .1 exp(-std_g / .05)

where std_g is the spread of the group's rewards and z is over the step's turns that have feedback: what came between
the reply before and this one. Masked feedback is `filler` in its place, one forward row a turn. The difference of
log-probs at the sampled tokens estimates the paper's KL. Groups of 5, no KL to a reference; the paper's entropy bonus
(.001) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.estimators import normalise, spread, whiten
from rolltap.trainer_client.recipe import Pass, Recipe
from rolltap.trainer_client.step import POLICY, Credit, RowView, Step, StepTurn
from rolltap.types import NO_VERSION, Segment


@dataclass
class InfoPO(Recipe):
    needs = ("turns",)
    strength: float = 0.1
    scale: float = 0.05
    filler: int = 0

    def passes(self, step: Step) -> Mapping[str, Pass]:
        masked = [self.masked(step, turn) for turn in step.turns if self.has_feedback(turn)]
        return {POLICY: Pass(), "masked": Pass(POLICY, masked)}

    def has_feedback(self, turn: StepTurn) -> bool:
        """Whether something was said to the agent before this turn that it could have learnt from."""
        return turn.index > 0 and len(turn.observed) > 0

    def masked(self, step: Step, turn: StepTurn) -> RowView:
        """The row up to the end of the turn, which alone is read, with the filler for what it was shown last."""
        whole, end = step.rows[turn.row].segment, int(turn.places[-1]) + 1
        ids, mask = whole.token_ids[:end].copy(), np.zeros(end, bool)
        ids[turn.places[0] - len(turn.observed) : turn.places[0]] = self.filler
        mask[turn.places] = True
        none, versions = np.zeros(end, np.float32), np.full(end, NO_VERSION, np.int32)
        extras = {name: array[:end] for name, array in whole.extras.items()}
        return RowView(Segment(ids, mask, none, versions, (), extras=extras), turn.row, turn.places)

    def credit(self, step: Step) -> Credit:
        shown, masked = (step.over_turns(step.readings[name].logprobs) for name in (POLICY, "masked"))
        told = np.array([self.has_feedback(turn) for turn in step.turns], bool)
        gain = np.zeros(len(told))
        gain[told] = whiten((shown - masked)[told])
        beta = self.strength * np.exp(-spread(step.rewards, step.groups) / self.scale)
        outcome = normalise(step.rewards, step.groups)
        return step.broadcast_turns(outcome[step.turn_rollouts] + beta[step.turn_rollouts] * gain)
