"""When a group is complete: a pure decision over its rollouts.

A rollout is *settled* when it is terminal and, if it is scored, has the rewards that the rule asks for. It is
*usable* when it is settled and not unscorable. A masked rollout does not wait for a reward; without one it stays out
of the baseline too.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from rolltap.contract.admin import EACH_CALL, WILDCARDS, GroupRule
from rolltap.contract.leases import even
from rolltap.types import RolloutStatus, Scoring


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout as the rule sees it. `scopes` are those it has rewards for, `reward` the sum of rollout scope."""

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
            return any(had.startswith(scope[:-1]) for had in self.scopes)
        return scope in self.scopes


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet."""


@dataclass(frozen=True, slots=True)
class Refill:
    """`count` more rollouts are to be opened."""

    count: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The group is ready, without the rollouts `left_out`, which become unscorable (cancelled where still open)."""

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """The group will never be ready."""

    reason: str
    left_out: tuple[str, ...] = ()


Decision = Wait | Refill | Complete | Drop


def decide(rule: GroupRule, members: Sequence[Member], *, n: int, late: bool) -> Decision:
    """What becomes of an open group of `n` first rollouts; `late` says that its deadline has passed."""
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
    """The rewards of the usable rollouts that have one."""
    return [
        member.reward
        for member in members
        if member.scoring is not Scoring.UNSCORABLE and member.rollout_id not in left_out and member.reward is not None
    ]


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether there are at least two rewards and all are equal: nothing to learn from."""
    return len(rewards) > 1 and even(rewards)
