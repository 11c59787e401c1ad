"""What a lease delivers: whole groups of rollouts, each with its trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolltap.types import Group, Rollout, Task, Trajectory

EQUAL_WITHIN = 1e-9
"""Rewards that differ by at most this share of their size are equal: their difference is rounding."""

LEAST_SIZE = 1e-6
"""The size that rewards near 0 are given."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether no reward differs from another, so that comparing them teaches nothing; also where there are fewer than
    two. The ledger and the trainer ask this; recipes centre rewards by the same tolerance."""
    least, most = min(rewards, default=0.0), max(rewards, default=0.0)
    return most - least <= EQUAL_WITHIN * max(abs(least), abs(most), LEAST_SIZE)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRecord:
    """A rollout with its trajectory: what a lease delivers for each member of a group.

    `reward` is the sum of the rollout-scope rewards, None while there is none.
    """

    rollout: Rollout
    trajectory: Trajectory
    reward: float | None


@dataclass(frozen=True, slots=True, eq=False)
class LeasedGroup:
    """A whole group, ready to train."""

    group: Group
    task: Task
    rollouts: tuple[RolloutRecord, ...]
    oldest_version: int  # of the trained tokens; NO_VERSION if none is trained
    newest_version: int
    staleness: int  # updates between the weights of the oldest trained token and those served
    replay: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A trainer's claim on whole groups. `token` is the fencing token: an older one is refused."""

    id: str
    trainer: str
    policy: str
    token: int
    expires_in: float  # seconds, by the database's clock, from when the reply was made
    policy_version: int
    groups: tuple[LeasedGroup, ...]
