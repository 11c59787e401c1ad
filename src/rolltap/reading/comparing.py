"""Compares two ranges of weight versions on the same tasks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rolltap.errors import InvalidRequest
from rolltap.reading.intervals import Interval, difference, paired
from rolltap.types import NO_VERSION

_RANGE = re.compile(r"\s*(\d{1,10})\s*(?:-\s*(\d{1,10})\s*)?")

SOLVED = 0.5
"""A rollout with a reward over this has solved its task."""


SHARE = 3
"""By default, the first third of a run's versions is compared with the last."""


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Weight versions `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class ComparedRollout:
    """A rewarded rollout whose trained tokens are all of one range's versions. `tokens`: sampled tokens of its session;
    None if the index does not know it yet."""

    task_id: str
    group_id: str
    rollout_id: str
    session_id: str
    first_version: int
    last_version: int
    reward: float
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """A task's rollouts of one range: their number, mean reward, the share that solved it, and mean sampled tokens."""

    rollouts: int
    reward: float
    solved: float
    tokens: float | None


@dataclass(frozen=True, slots=True)
class ComparedTask:
    """A task under both ranges. `difference`: the second's mean reward minus the first's. `interval`: its 95% interval;
    None with too few rollouts."""

    task_id: str
    first: ComparedSide
    second: ComparedSide
    difference: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class VersionComparison:
    """The tasks that both ranges have, the largest gain first. `difference`: the mean of the tasks' differences, each
    task with equal weight. `left_out`: number of tasks that only one range has."""

    policy: str
    first: VersionRange
    second: VersionRange
    tasks: tuple[ComparedTask, ...]
    difference: float | None
    interval: Interval | None
    left_out: int


def default_ranges(
    tasks: Sequence[tuple[int, int]], versions: Sequence[int]
) -> tuple[VersionRange, VersionRange] | None:
    """Returns two ranges of versions, an early and a late one, that share a task; None if no two do.

    `tasks` has the lowest version with which a rollout of each task ends, and the highest with which one begins;
    `versions` are all of them in order. The ranges are the first and the last third; if these share no task, all
    versions before and from one of them on: where most tasks are shared, the most even cut of several such.
    """
    third = max(1, len(versions) // SHARE)

    def shared(last: int, first: int) -> int:
        return sum(lowest <= last < first <= highest for lowest, highest in tasks)

    cuts = [(third, len(versions) - third)] if len(versions) > 1 else []
    if not any(shared(versions[one - 1], versions[other]) for one, other in cuts):
        cuts = [(at, at) for at in range(1, len(versions))]
    counts = [
        (shared(versions[one - 1], versions[other]), -abs(one - len(versions) / 2), one, other) for one, other in cuts
    ]
    if not counts or not max(counts)[0]:
        return None
    _, _, one, other = max(counts)
    return VersionRange(versions[0], versions[one - 1]), VersionRange(versions[other], versions[-1])


def version_range(text: str, name: str) -> VersionRange:
    """Parses `7` or `3-9`. Raises `InvalidRequest`, which names the parameter."""
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
    if not first <= last < 2**31:
        raise InvalidRequest(f"{name}: a weight version (7) or a range of them (3-9), not {text[:40]!r}", param=name)
    return VersionRange(first, last)


def compared(
    policy: str, sides: Mapping[VersionRange, Sequence[ComparedRollout]], first: VersionRange, second: VersionRange
) -> VersionComparison:
    """Compares two ranges; `sides` are the rollouts of both."""
    by_task = [_by_task(sides[versions]) for versions in (first, second)]
    common = by_task[0].keys() & by_task[1].keys()
    tasks = [_task(task_id, by_task[0][task_id], by_task[1][task_id]) for task_id in common]
    tasks.sort(key=lambda task: (-task.difference, task.task_id))
    gains = [task.difference for task in tasks]
    return VersionComparison(
        policy,
        first,
        second,
        tuple(tasks),
        fmean(gains) if gains else None,
        paired(gains),
        len(by_task[0].keys() | by_task[1].keys()) - len(common),
    )


def within(
    rollout: ComparedRollout, versions: VersionRange, sampled: Mapping[str, tuple[int, int]]
) -> ComparedRollout | None:
    """Returns the rollout if all its versions are in the range, else None.

    A rollout without versions of its own gets those that its session `sampled`.
    """
    if rollout.first_version == NO_VERSION:
        first, last = sampled.get(rollout.session_id, (NO_VERSION, NO_VERSION))
        rollout = replace(rollout, first_version=first, last_version=last)
    return rollout if versions.first <= rollout.first_version <= rollout.last_version <= versions.last else None


def _by_task(rollouts: Sequence[ComparedRollout]) -> dict[str, list[ComparedRollout]]:
    by_task: defaultdict[str, list[ComparedRollout]] = defaultdict(list)
    for rollout in rollouts:
        by_task[rollout.task_id].append(rollout)
    return dict(by_task)


def _task(task_id: str, first: Sequence[ComparedRollout], second: Sequence[ComparedRollout]) -> ComparedTask:
    rewards = [[rollout.reward for rollout in side] for side in (first, second)]
    return ComparedTask(
        task_id,
        _side(first),
        _side(second),
        fmean(rewards[1]) - fmean(rewards[0]),
        difference(rewards[0], rewards[1]),
    )


def _side(rollouts: Sequence[ComparedRollout]) -> ComparedSide:
    tokens = [rollout.tokens for rollout in rollouts if rollout.tokens is not None]
    return ComparedSide(
        rollouts=len(rollouts),
        reward=fmean(rollout.reward for rollout in rollouts),
        solved=fmean(rollout.reward > SOLVED for rollout in rollouts),
        tokens=fmean(tokens) if tokens else None,
    )
