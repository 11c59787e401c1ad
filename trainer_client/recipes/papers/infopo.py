"""InfoPO: "InfoPO: Information-Driven Policy Optimization for User-Centric Agents".

    r_info(t) = mean over the next reply's tokens of log pi(token | feedback) - log pi(token | feedback masked)
    A_t = A_GRPO + beta z(r_info(t))        beta = .1 / (1 + exp(std_g / .05))

as in the released code: feedback is what turn t was answered, between its reply and the next, and who asks is paid for
what was learnt. std_g is the spread of the group's rewards, z is over the group's turns that were answered and replied
to; where several replies follow one (branches), r_info is their mean. Masked feedback is `filler` in its place, one
forward row a reply; the code writes "No information found.". The difference of log-probs at the sampled tokens
estimates the paper's KL. The code takes z over tokens, each with r_info over its reply's length, and scales it down
where its deviation is over 1. Groups of 5, no KL to a reference; the paper's entropy bonus (.001) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rolltap.errors import ConfigError
from rolltap.token_masks import per_token
from rolltap.trainer_client.data.step import POLICY, Credit, Pass, RowView, Step, StepTurn
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import normalise, spread
from rolltap.types import NO_VERSION, ROUTED_EXPERTS, Segment


@dataclass
class InfoPO(Recipe):
    needs = ("turns",)
    strength: float = 0.1
    scale: float = 0.05
    filler: int = 0

    def passes(self, step: Step) -> Mapping[str, Pass]:
        masked = [self.masked(step, step.turns[reply]) for reply in self.answered(step)]
        return {POLICY: Pass(), "masked": Pass(POLICY, masked)}

    def answered(self, step: Step) -> dict[int, int]:
        """Numbers of the turns that were shown feedback on the turn before in their row, and that turn's number."""
        numbers = {(turn.rollout, turn.call_id): number for number, turn in enumerate(step.turns)}
        questions = {}
        for number, turn in enumerate(step.turns):
            calls = [span.call_id for span in step.rows[turn.row].segment.turns]
            at = calls.index(turn.call_id)
            question = numbers.get((turn.rollout, calls[at - 1])) if at else None
            if question is not None and len(turn.observed):
                questions[number] = question
        return questions

    def masked(self, step: Step, turn: StepTurn) -> RowView:
        """The row up to the end of the turn, which alone is read, with the filler for what it was shown last."""
        whole, end = step.rows[turn.row].segment, int(turn.places[-1]) + 1
        if whole.images:
            raise ConfigError("infopo takes observations out of prompts, and can't where these show images")
        ids, mask = whole.token_ids[:end].copy(), np.zeros(end, bool)
        start = next(span.start for span in whole.turns if span.call_id == turn.call_id)
        ids[start - len(turn.observed) : start] = self.filler
        mask[turn.places] = True
        none, versions = np.zeros(end, np.float32), np.full(end, NO_VERSION, np.int32)
        extras = per_token(whole.extras, lambda _, array: array[:end])
        extras.pop(ROUTED_EXPERTS, None)  # routed anew
        return RowView(Segment(ids, mask, none, versions, (), extras=extras), turn.row, turn.places)

    def credit(self, step: Step) -> Credit:
        shown, masked = (step.over_turns(step.readings[name].logprobs) for name in (POLICY, "masked"))
        pairs = self.answered(step)
        replies, questions = (np.array(list(one), np.int64) for one in (pairs.keys(), pairs.values()))
        gain = np.zeros(len(step.turns))
        count = np.bincount(questions, minlength=len(gain))
        has_answer = count > 0
        mean = np.bincount(questions, (shown - masked)[replies], len(gain)) / np.maximum(count, 1)
        gain[has_answer] = normalise(mean[has_answer], step.turn_groups[has_answer])
        beta = self.strength / (1 + np.exp(spread(step.rewards, step.groups) / self.scale))
        outcome = normalise(step.rewards, step.groups)
        return step.broadcast_turns(outcome[step.turn_rollouts] + beta[step.turn_rollouts] * gain)
