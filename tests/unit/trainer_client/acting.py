"""Groups with turns, agents, branches and rewards of every scope: what recipes are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rolltap.contract.trainer import LeasedGroup, RolloutRecord
from rolltap.types import NO_VERSION, CallSpan, Reward, Scoring, Segment

from .making import VOCABULARY, group, record

AGENTS = ("", "verifier")


def spoken(name: str, turns: Sequence[tuple[Sequence[int], Sequence[int], str]], *, first: int = 0) -> Segment:
    """A segment of (observed ids, sampled ids, agent) one after the other; calls are `<name>-<number>`."""
    ids: list[int] = []
    spans: list[CallSpan] = []
    for number, (observed, sampled, agent) in enumerate(turns):
        start = len(ids) + len(observed)
        ids += [*observed, *sampled]
        spans.append(CallSpan(f"{name}-{first + number:02}", start, len(ids), True, number, agent))
    mask = np.zeros(len(ids), bool)
    for span in spans:
        mask[span.start : span.end] = True
    rng = np.random.default_rng(len(ids))
    noise = rng.normal(-np.log(VOCABULARY), 0.2, len(ids))
    return Segment(
        np.array(ids, np.int32),
        mask,
        np.where(mask, noise, 0).astype(np.float32),
        np.where(mask, 0, NO_VERSION).astype(np.int32),
        tuple(spans),
    )


def branched(trunk: Segment, observed: Sequence[int], sampled: Sequence[int], name: str) -> Segment:
    """A row that goes on from the trunk's first call, which carries loss in the trunk only."""
    kept = trunk.turns[0].end
    alone = spoken(name, [([*trunk.token_ids[:kept].tolist(), *observed], sampled, "")], first=90)
    return replace(alone, turns=(replace(trunk.turns[0], trained=False), *alone.turns))


def rewarded(one: RolloutRecord, **scopes: float) -> RolloutRecord:
    """The record with rewards: `turn_NAME` of a call, `role_NAME` of a role."""
    found = []
    for key, value in scopes.items():
        kind, _, name = key.partition("_")
        scope = f"call:{name.replace('_', '-')}" if kind == "turn" else f"role:{name}"
        found.append(Reward(key, one.rollout.id, value, scope))
    return replace(one, rollout=replace(one.rollout, rewards=tuple(found)))


def hinted(one: RolloutRecord, hint: str | Sequence[int]) -> RolloutRecord:
    """The record with a hint in the detail of a reward."""
    note = Reward("hint", one.rollout.id, 0.0, "role:hint", detail={"hint": hint})
    return replace(one, rollout=replace(one.rollout, rewards=(*one.rollout.rewards, note)))


def scripted(name: str, turn_rewards: Sequence[Sequence[float]], outcomes: Sequence[float]) -> LeasedGroup:
    """One rollout a list of turn rewards: turns of one agent, two sampled tokens each."""
    records = []
    for index, (rewards, outcome) in enumerate(zip(turn_rewards, outcomes, strict=True)):
        own = f"{name}r{index}"
        part = spoken(own, [([5, 6, 7], [8 + index, 9 + turn], "") for turn in range(len(rewards))])
        made = record(name, index, [part], outcome)
        scopes = {f"turn_{own}_{turn:02}": value for turn, value in enumerate(rewards)}
        records.append(rewarded(made, **scopes))
    return group(name, records)


def acted_group(name: str, seed: int, rewards: Sequence[float] = (1.0, 0.0, 0.5, 0.75, 0.25)) -> LeasedGroup:
    """Rollouts of one prompt: two agents in turn, a branch, rewards by turn and role; the last one is masked."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCABULARY, 20).tolist()
    records = []
    for index, reward in enumerate(rewards):
        own = f"{name}r{index}"

        def drawn(count: int) -> list[int]:
            return rng.integers(0, VOCABULARY, count).tolist()

        turns = [(prompt, drawn(6), ""), (drawn(3), drawn(4), "verifier"), ([3, 4, index % 2], drawn(5 + index), "")]
        trunk = spoken(own, turns)
        rows = [trunk, branched(trunk, drawn(2), drawn(3), own)]
        scoring = Scoring.MASKED if index == len(rewards) - 1 else Scoring.SCORED
        scopes = {f"turn_{own}_{number:02}": float(rng.integers(0, 3)) / 2 for number in range(3)}
        roles = {"role_verifier": float(index % 2), "role_solver": reward}
        made = rewarded(record(name, index, rows, reward, scoring), **scopes, **roles)
        records.append(hinted(made, [7, 8, 9, index]) if index % 2 else made)
    return group(name, records)
