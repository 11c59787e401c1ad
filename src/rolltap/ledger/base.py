"""The ledger's settings, and its results that are neither glossary types nor part of the contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltap.types import NO_VERSION, Group, Rollout, Trajectory

TrajectoriesOf = Callable[[Sequence[str]], Awaitable[Sequence[Trajectory]]]
"""Session ids to trajectories, in their order: the reconstructor on the call log."""

CloseSession = Callable[[str], Awaitable[None]]
"""Closes a session: later calls with its key are refused. Closing a closed one changes nothing."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Times are in seconds."""

    max_failures: int = 3
    """A group is dead after this many refusals by trainers."""

    lease_ttl: float = 600.0
    """Lifetime of a lease that names none."""

    poll: float = 0.5
    """How often a waiting lease looks for changes by other processes."""

    open_retry_after: float = 1.0
    """`Retry-After` while too many groups are outstanding."""

    trainer_silence: float = 600.0
    """A trainer that was silent (no lease taken, extended or ended) for this long no longer counts for backpressure."""

    infra_retries: int = 3
    """Attempts that a rollout may lose to the infrastructure and be tried again; the next failure ends it."""

    max_generations: int = 4
    """How often a zero-variance group is replaced, counting the first one."""

    event_memory: float = 86_400.0
    """How long events are kept."""


@dataclass(frozen=True, slots=True)
class TrainedVersions:
    """What the ledger keeps of a trajectory: the weight versions of its trained tokens, and the trained calls."""

    oldest: int = NO_VERSION
    newest: int = NO_VERSION
    calls: tuple[str, ...] = ()

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrainedVersions:
        calls = tuple(turn.call_id for segment in trajectory.segments for turn in segment.turns if turn.trained)
        versions = [segment.versions for segment in trajectory.segments if len(segment)]
        newest = max((int(array.max()) for array in versions), default=NO_VERSION)
        if newest == NO_VERSION:
            return cls(calls=calls)
        # What is not trained has version -1, which without a sign is the largest number.
        return cls(min(int(array.view(np.uint32).min()) for array in versions), newest, calls)


@dataclass(frozen=True, slots=True)
class StartedRollout:
    """A new attempt."""

    rollout: Rollout
    policy: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that trainers refused too often, and the last reason."""

    group: Group
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Counts of one policy. `room` is how many groups may still be opened, None while nothing bounds it.

    `staleness` counts the groups that are ready by how many updates their oldest trained token is behind.
    """

    policy: str
    version: int
    groups: Mapping[str, int]
    rollouts: Mapping[str, int]
    outstanding: int
    room: int | None
    zero_variance: int
    staleness: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, in the order of `seq`."""

    seq: int
    at: float
    kind: str
    subject: str
    data: Mapping[str, Any]
