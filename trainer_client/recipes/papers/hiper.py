"""HiPER: Peng et al. 2026, "HiPER: Hierarchical Reinforcement Learning with Explicit Credit Assignment for Large
Language Model Agents", hierarchical advantage estimation (HAE); as in its code.

A reply says `<switch>KEEP or SWITCH</switch><subgoal>...</subgoal><action>...</action>`; the harness's prompt asks for
it. A segment begins with the first turn and with every SWITCH; no tag is KEEP. With V_high where a segment begins:

    action tokens    A_t by GAE(gamma, lam) in the segment, whose last turn is followed by the next segment's V_high
    subgoal tokens   of a segment's first turn: delta_k = sum of gamma^j r_j + gamma^d V_high(next) - V_high
                     A_k = delta_k + gamma^d lam_segment A_(k+1)        d the segment's length
    switch tokens    A = G_t - V_term        G_t the segment's return-to-go, followed by the next one's V_high

each level whitened over the step (`whitened`; the released code leaves it to a setting). V_low is read where the action
begins, V_high and V_term where the reply does. A rollout loses `keep_penalty` times its share of KEEP turns, spread
over these, and `change_penalty` for each turn that keeps and names another subgoal. Tokens outside the tags learn
nothing, and a reply without an action is one. In the code the critic is a model of its own with three heads (here
linear heads on the policy's last hidden state), a rollout that the turn cap ended is followed by its own last value
(here by nothing), and an invalid action costs .1 (here what the evaluator says of the call).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rolltap.trainer_client.data.step import POLICY, Credit, Step, ValueHead
from rolltap.trainer_client.recipes.critic import CriticRecipe, with_turn_targets
from rolltap.trainer_client.recipes.estimators import Numbers, discounted, gae, whiten

LEVELS = {"low": "action", "high": "subgoal", "term": "switch"}
"""Which tag's tokens each level trains."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply cut by its tags: the numbers of each tag's tokens, whether it switches, and its subgoal."""

    tokens: dict[str, range]
    switches: bool
    subgoal: str

    @classmethod
    def of(cls, pieces: Sequence[str]) -> Reply:
        """`pieces` are the texts of its tokens."""
        text, starts = "".join(pieces), np.cumsum([0, *map(len, pieces)])
        matches = {tag: re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in LEVELS.values()}
        tokens = {
            tag: range(np.searchsorted(starts, one.start(), "right") - 1, np.searchsorted(starts, one.end()))
            for tag, one in matches.items()
            if one
        }
        words = {tag: one[1].strip() if one else "" for tag, one in matches.items()}
        switches = words["switch"].upper() not in ("", "KEEP")
        return cls({"action": range(len(pieces)), **tokens}, switches, words["subgoal"])


@dataclass
class HiPER(CriticRecipe):
    settings = {"loss": {"kl": 0.01}, "optimiser": {"lr": 1e-6}}
    needs = ("turns",)
    reads_policy = True
    heads = {name: ValueHead(lr=1e-5) for name in LEVELS}
    gamma: float = 1.0
    lam: float = 1.0
    lam_segment: float = 0.95
    keep_penalty: float = 0.3
    change_penalty: float = 0.3
    whitened: bool = True

    def credit(self, step: Step) -> Credit:
        replies = [Reply.of(step.texts(turn)) for turn in step.turns]
        rewards = step.with_outcome()
        begins = np.zeros(len(replies), bool)
        for sequence in step.sequences():
            rewards[sequence] -= self.penalties([replies[number] for number in sequence])
            begins[sequence] = [index == 0 or replies[number].switches for index, number in enumerate(sequence)]
        places = {"low": [reply.tokens["action"].start for reply in replies], "high": None, "term": None}
        values = {name: step.read_turns(step.readings[POLICY].values[name], at) for name, at in places.items()}
        advantages = {name: np.zeros(len(replies)) for name in LEVELS}
        for sequence in step.sequences():
            columns = (rewards, begins, values["low"], values["high"])
            low, high, to_go = self.estimate(*(column[sequence] for column in columns))
            advantages["low"][sequence], advantages["high"][sequence] = low, high
            advantages["term"][sequence] = to_go - values["term"][sequence]
        credit = self.assigned(step, replies, advantages, begins)
        for name in LEVELS:
            counts = begins if name == "high" else np.ones(len(replies))
            credit = with_turn_targets(credit, step, name, advantages[name] + values[name], places[name], counts)
        return credit

    def penalties(self, replies: Sequence[Reply]) -> Numbers:
        """What each turn of a rollout loses. Of two turns, SWITCH and KEEP with another subgoal: 0 and .15 + .3.

        Of KEEP, SWITCH and KEEP: .1, 0 and .1.
        """
        keeps = np.array([not reply.switches for reply in replies])
        changed = [a.subgoal != b.subgoal and bool(a.subgoal and b.subgoal) for a, b in pairwise(replies)]
        losses = self.change_penalty * (keeps & np.array([False, *changed]))
        if len(replies) > 1:
            losses += self.keep_penalty * keeps / len(replies)
        return losses

    def estimate(self, rewards: Numbers, begins: Numbers, low: Numbers, high: Numbers) -> tuple[Numbers, ...]:
        """Low and high advantages and the returns-to-go of one rollout's turns; high ones are 0 within a segment.

        r [0, 0, 1], a segment at turns 0 and 2, V_low [.3, .4, .6], V_high .2 and .5, gamma 1, both lam .95: low
        [.195, .1, .4], high .775 and .5, to go [.5, .5, 1].
        """
        low_advantages, high_advantages, to_go = (np.zeros(len(rewards)) for _ in range(3))
        starts = np.flatnonzero(begins)
        later, following = 0.0, 0.0  # of the segment after: its advantage, and the value where it begins
        for start, end in reversed(list(zip(starts, [*starts[1:], len(rewards)], strict=True))):
            own, earned = slice(start, end), rewards[start:end].copy()
            low_advantages[own] = gae(earned, low[own], self.gamma, self.lam, last=following)
            earned[-1] += self.gamma * following
            to_go[own] = discounted(earned, self.gamma)
            later = to_go[start] - high[start] + self.gamma ** (end - start) * self.lam_segment * later
            high_advantages[start], following = later, high[start]
        return low_advantages, high_advantages, to_go

    def assigned(self, step: Step, replies: Sequence[Reply], levels: dict[str, Numbers], begins: Numbers) -> Credit:
        """Each level's advantages at the tokens of its tag; a subgoal's only where a segment begins."""
        arrays = tuple(np.zeros(len(row.segment), np.float32) for row in step.rows)
        for name, tag in LEVELS.items():
            tagged = [number for number, reply in enumerate(replies) if tag in reply.tokens]
            own = [number for number in tagged if name != "high" or begins[number]]
            values = whiten(levels[name][own], ddof=0) if self.whitened else levels[name][own]
            for number, value in zip(own, values, strict=True):
                turn = step.turns[number]
                arrays[turn.row][turn.places[list(replies[number].tokens[tag])]] += value
        return Credit(arrays)
