"""The ledger's settings, and its results that are neither glossary types nor part of the contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltap.types import NO_VERSION, Group, Rollout, Trajectory

TrajectoriesOf = Callable[[Sequence[str]], Awaitable[Sequence[Trajectory]]]
"""Rebuilds the trajectories of sessions, in the order of their ids: the reconstructor on the call log."""

CloseSession = Callable[[str], Awaitable[None]]
"""Closes a session, so that later calls with its key are refused. Closing it again has no effect."""


NOTHING_TO_TRAIN = "nothing to train: no reply in it carries loss"
"""The reason of a group that was dropped for that."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Times are in seconds."""

    max_failures: int = 3
    """A group is dead after this many refusals by trainers."""

    lease_ttl: float = 600.0
    """Default lifetime of a lease."""

    poll: float = 0.5
    """Interval at which a waiting lease looks for changes by other processes."""

    open_retry_after: float = 1.0
    """`Retry-After` if too many groups are outstanding."""

    trainer_silence: float = 600.0
    """A trainer that took, extended or ended no lease for this long does not count for backpressure."""

    infra_retries: int = 3
    """Number of retries of a rollout after infrastructure failures. The next such failure ends it."""

    max_generations: int = 4
    """Maximum number of groups for one task when zero-variance groups are replaced, including the first."""

    event_memory: float = 86_400.0
    """Time for which events are kept."""


@dataclass(frozen=True, slots=True)
class TrainedVersions:
    """A trajectory's oldest and newest weight version over its trained tokens, and its trained calls.

    `sampled`: whether a model answered anything in it, as tokens or as text.
    """

    oldest: int = NO_VERSION
    newest: int = NO_VERSION
    calls: tuple[str, ...] = ()
    sampled: bool = True

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrainedVersions:
        calls = tuple(turn.call_id for segment in trajectory.segments for turn in segment.turns if turn.trained)
        sampled = answered(trajectory)
        versions = [segment.versions for segment in trajectory.segments if len(segment)]
        newest = max((int(array.max()) for array in versions), default=NO_VERSION)
        if newest == NO_VERSION:
            return cls(calls=calls, sampled=sampled)
        # Untrained tokens have version -1, which is the largest number when read as unsigned.
        return cls(min(int(array.view(np.uint32).min()) for array in versions), newest, calls, sampled)


def answered(trajectory: Trajectory) -> bool:
    """Whether a model answered anything in the session. A call that failed or was cut off before its first token, or
    was passed through and failed, is no answer."""
    counts = trajectory.counts
    return bool(counts.get("sampled_tokens") or counts.get("masked_calls.tokens_missing"))


@dataclass(frozen=True, slots=True)
class StartedRollout:
    """A rollout with a new attempt, and its policy."""

    rollout: Rollout
    policy: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that trainers refused too often, with the last reason."""

    group: Group
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Counts of one policy. `room`: the number of groups that may still be opened; None if there is no limit.

    `staleness`: the number of ready groups by the staleness of their oldest trained token. `abandoned`: the number of
    those with a token of weights that a rewind abandoned, which are in no `staleness`. `untrained`: the number of
    groups that were dropped because no reply in them is trained. `unanswered`: the number of ended rollouts in which
    nothing was sampled.
    """

    policy: str
    version: int
    groups: Mapping[str, int]
    rollouts: Mapping[str, int]
    outstanding: int
    room: int | None
    zero_variance: int
    staleness: Mapping[int, int] = field(default_factory=dict)
    abandoned: int = 0
    untrained: int = 0
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the ledger. `seq` gives the order."""

    seq: int
    at: float
    kind: str
    subject: str
    data: Mapping[str, Any]
