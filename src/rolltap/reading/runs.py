"""Groups and runs for display, the comparison of two ranges of a run's weight versions on the same tasks, and a
trainer's steps, from the file that it writes itself: a JSON object a line, as our `metrics.jsonl`.

Intervals are of 95%, of a share or of the difference of two means, for few samples. Shares (all values 0 or 1) use
Newcombe's hybrid of Wilson's score intervals (Statistics in Medicine 17, 1998, method 10), which stay valid at 0 of 4
and 4 of 4. Other values use Welch's t, paired differences Student's t.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import Any

from rolltap.calllog.annotations import MismatchSums
from rolltap.errors import InvalidRequest
from rolltap.ledger.views import GroupRow, PolicyCounts
from rolltap.reading.types import (
    ComparedSide,
    ComparedTask,
    GroupEffort,
    GroupLine,
    HarnessMismatch,
    Interval,
    RunLine,
    RunPoint,
    TrainerStep,
    VersionComparison,
    VersionRange,
)
from rolltap.settings import Settings
from rolltap.types import EVALUATION, NO_VERSION, PURPOSE_TAG, Scoring, Trajectory, common_length


def group_line(group_row: GroupRow, sampled: tuple[int, int] | None = None) -> GroupLine:
    """Makes a line from a group's row. `sampled`: versions that stand in for those of trained tokens."""
    group, row = group_row.group, group_row.row
    oldest, newest = _versions(row, sampled)
    return GroupLine(
        id=group.id,
        task_id=group.task_id,
        instruction=row.instruction,
        policy=group.policy,
        status=group.status.value,
        reason=row.reason,
        created_at=group.created_at,
        completed_at=row.completed_at,
        rewards=tuple(
            None if rollout.scoring is Scoring.UNSCORABLE else group.reward_of(rollout) for rollout in group.rollouts
        ),
        oldest_version=oldest,
        newest_version=newest,
        step=row.acked_step,
        failures=group.failures,
        tags=group.tags,
        trains=group.trains,
    )


def run_line(counts: PolicyCounts) -> RunLine | None:
    """Returns the run of a policy; None if it never had a group."""
    if counts.first_at is None:
        return None
    return RunLine(
        policy=counts.name,
        version=counts.version,
        groups=sum(counts.groups.values()),
        rollouts=sum(counts.rollouts.values()),
        first_at=counts.first_at,
        last_at=counts.last_at or counts.first_at,
        reward=counts.reward,
    )


def _versions(row: Any, sampled: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """Returns a group's oldest and newest version: of its trained tokens, else the `sampled` ones, else None."""
    if row.newest_version is not None and row.newest_version != NO_VERSION:
        return row.oldest_version, row.newest_version
    return sampled or (None, None)


def run_point(row: Any, sums: MismatchSums | None = None, effort: GroupEffort | None = None) -> RunPoint:
    """Makes a point from a completed group's row, the sums of its annotations, and its effort, if it has any."""
    sampled = (effort.oldest_version, effort.newest_version) if effort is not None else None
    oldest, newest = _versions(row, sampled)
    return RunPoint(
        group_id=row.id,
        at=row.completed_at,
        status=row.status,
        rollouts=row.n,
        reward_mean=row.reward_mean,
        zero_variance=row.zero_variance,
        oldest_version=oldest,
        newest_version=newest,
        staleness=None if oldest is None or newest is None else newest - oldest,
        step=row.acked_step,
        mismatch=None if sums is None else _share(sums.mismatch_sum, sums.compared),
        evaluation=f"{PURPOSE_TAG}={EVALUATION}" in row.tags,
    )


def harness_mismatch(harness: str, sums: MismatchSums) -> HarnessMismatch:
    """Converts the sums of a harness's annotations to means."""
    return HarnessMismatch(
        harness=harness,
        calls=sums.calls,
        compared=sums.compared,
        mismatch=_share(sums.mismatch_sum, sums.compared),
        mismatch_max=sums.mismatch_max,
        fresh=sums.fresh,
        fresh_mismatch=_share(sums.fresh_sum, sums.fresh),
        clipped=_share(sums.clipped, sums.clipped + sums.kept),
    )


def _share(part: float, whole: int) -> float | None:
    return float(part / whole) if whole else None


def common_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Returns how many leading tokens the first segments of all trajectories share."""
    firsts = [trajectory.segments[0].token_ids for trajectory in trajectories if trajectory.segments]
    return min((common_length(firsts[0], ids) for ids in firsts[1:]), default=0)


_RANGE = re.compile(r"\s*(\d{1,10})\s*(?:-\s*(\d{1,10})\s*)?")

SOLVED = 0.5
"""A rollout with a reward over this has solved its task."""


SHARE = 3
"""By default, the first third of a run's versions is compared with the last."""


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
    by_task: list[dict[str, list[ComparedRollout]]] = [{}, {}]
    for tasks_of_side, versions in zip(by_task, (first, second), strict=True):
        for rollout in sides[versions]:
            tasks_of_side.setdefault(rollout.task_id, []).append(rollout)
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


Z = NormalDist().inv_cdf(0.975)

FEW = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Student's 97.5% quantiles for few degrees of freedom."""


def difference(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """Returns the interval of the mean of `second` minus the mean of `first`; None with too few values."""
    if first and second and all(value in (0, 1) for value in (*first, *second)):
        return _newcombe(first, second)
    if len(first) < 2 or len(second) < 2:
        return None
    shares = [variance(values) / len(values) for values in (first, second)]
    middle, spread = fmean(second) - fmean(first), math.sqrt(sum(shares))
    if spread == 0:
        return None  # no variance on either side: so few values can't tell how others vary
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True)
    )
    reach = student(freedom) * spread
    return middle - reach, middle + reach


def paired(differences: Sequence[float]) -> Interval | None:
    """Returns the interval of the mean of differences; None for fewer than two, and for equal ones: so few values can't
    tell how others vary."""
    if len(differences) < 2 or len(set(differences)) == 1:
        return None
    reach = student(len(differences) - 1) * math.sqrt(variance(differences) / len(differences))
    return fmean(differences) - reach, fmean(differences) + reach


def student(freedom: float) -> float:
    """Returns the 97.5% quantile of Student's t; over 4 degrees of freedom by the Cornish-Fisher expansion. Fractions
    are rounded down."""
    n = max(1, math.floor(freedom))
    if n in FEW:
        return FEW[n]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / n + second / n**2 + third / n**3


def _newcombe(first: Sequence[float], second: Sequence[float]) -> Interval:
    before, after = fmean(first), fmean(second)
    (low_1, high_1), (low_2, high_2) = wilson(before, len(first)), wilson(after, len(second))
    middle = after - before
    return (
        middle - math.hypot(after - low_2, high_1 - before),
        middle + math.hypot(high_2 - after, before - low_1),
    )


def wilson(share: float, count: int) -> Interval:
    """Returns the score interval of a share of `count` independent samples (Wilson 1927, eq. 4)."""
    middle = share + Z**2 / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    low, high = (middle - reach) / (1 + Z**2 / count), (middle + reach) / (1 + Z**2 / count)
    return max(0.0, low), min(1.0, high)


MAX_BYTES = 32 << 20
"""Bytes at the end of a file that are read."""

StepFiles = Mapping[str, Path]
"""The file of each policy's trainer; that of "" is of every other policy."""


def step_files(settings: Settings) -> dict[str, Path]:
    """Returns the files that the settings name (`metrics` of a policy)."""
    return {name: Path(policy.metrics).expanduser() for name, policy in settings.policies.items() if policy.metrics}


def changed_at(path: Path | None) -> float | None:
    """Returns when a file last changed; None if there is none."""
    try:
        return path.stat().st_mtime if path is not None else None
    except OSError:
        return None


def read_steps(path: Path | None) -> list[TrainerStep]:
    """Returns the steps of a file in their order, each with its last attempt. Empty if there is no such file.

    Lines that can't be read are left out: the last may be cut off while the trainer writes it.
    """
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_BYTES))
            lines = file.read(MAX_BYTES).splitlines()
    except OSError:
        return []
    by_step: dict[int, TrainerStep] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and (step := _number(row.pop("step", None))) is not None and step == int(step):
            numbers = {name: number for name, value in row.items() if (number := _number(value)) is not None}
            by_step[int(step)] = TrainerStep(int(step), numbers)
    return [by_step[step] for step in sorted(by_step)]


def _number(value: object) -> float | None:
    """Returns a finite number; None for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer that no float can hold
        return None
    return number if math.isfinite(number) else None
