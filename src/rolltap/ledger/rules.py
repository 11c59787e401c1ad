"""Decides when a group is complete: a pure function of its rollouts.

A rollout is *settled* if it is terminal and, if it is scored, has the rewards that the rule requires. It is *usable* if
it is settled and not unscorable. A masked rollout does not wait for a reward; without a reward it is not in the
baseline either.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from rolltap.contract.admin import EACH_CALL, WILDCARDS, GroupRule
from rolltap.contract.trainer import all_equal
from rolltap.types import RolloutStatus, Scoring


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout's input to the rule. `scopes`: scopes of its rewards; `reward`: its total reward of scope rollout."""

    rollout_id: str
    status: RolloutStatus
    scoring: Scoring
    scopes: Set[str] = frozenset()
    reward: float | None = None
    trained_calls: tuple[str, ...] = ()

    def settled(self, scopes: Sequence[str]) -> bool:
        if not self.status.terminal:
            return False
        return self.scoring is not Scoring.SCORED or all(self._has(scope) for scope in scopes)

    def _has(self, scope: str) -> bool:
        if scope == EACH_CALL:
            return all(f"call:{call}" in self.scopes for call in self.trained_calls)
        if scope in WILDCARDS:
            return any(own.startswith(scope[:-1]) for own in self.scopes)
        return scope in self.scopes


@dataclass(frozen=True, slots=True)
class Wait:
    """The group stays open."""


@dataclass(frozen=True, slots=True)
class Refill:
    """The group needs `count` more rollouts."""

    count: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The group is ready. The rollouts `left_out` become unscorable, and are cancelled if they are not terminal."""

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """The group can never be ready."""

    reason: str
    left_out: tuple[str, ...] = ()


Decision = Wait | Refill | Complete | Drop


def decide(rule: GroupRule, members: Sequence[Member], *, n: int, late: bool) -> Decision:
    """The decision for an open group that began with `n` rollouts. `late`: its deadline has passed."""
    settled = [member for member in members if member.settled(rule.scopes)]
    usable = [member for member in settled if member.scoring is not Scoring.UNSCORABLE]
    waiting = tuple(member.rollout_id for member in members if not member.settled(rule.scopes))
    if rule.usable is not None and len(usable) >= rule.usable:
        return Complete(left_out=waiting)
    if late and waiting:
        if rule.late == "partial" and len(usable) >= rule.min_usable:
            return Complete(left_out=waiting)
        return Drop(f"deadline: {len(usable)} of {len(members)} rollouts were usable", left_out=waiting)
    if rule.usable is not None and not late:
        missing = min(rule.usable - len(usable) - len(waiting), n + rule.spares - len(members))
        if missing > 0:
            return Refill(missing)
    if waiting:
        return Wait()
    if len(usable) >= rule.min_usable:
        return Complete()
    return Drop(f"{len(usable)} of {len(members)} rollouts were usable; {rule.min_usable} are needed")


def usable_rewards(members: Sequence[Member], left_out: Sequence[str]) -> list[float]:
    """The rewards of the usable rollouts."""
    return [
        member.reward
        for member in members
        if member.scoring is not Scoring.UNSCORABLE and member.rollout_id not in left_out and member.reward is not None
    ]


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether there are at least two rewards and all are equal, so that the group has no gradient."""
    return len(rewards) > 1 and all_equal(rewards)
