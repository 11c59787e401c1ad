"""Converts groups and runs for display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rolltap.calllog.annotations import MismatchSums
from rolltap.ledger.rows import total_reward
from rolltap.ledger.views import GroupRow, PolicyCounts
from rolltap.reading.types import GroupEffort, GroupLine, HarnessMismatch, RunLine, RunPoint
from rolltap.types import EVALUATION, NO_VERSION, PURPOSE_TAG, Trajectory


def group_line(group_row: GroupRow, sampled: tuple[int, int] | None = None) -> GroupLine:
    """Makes a line from a group's row. `sampled`: versions that stand in for those of trained tokens."""
    group, row = group_row.group, group_row.row
    oldest, newest = _versions(row, sampled)
    return GroupLine(
        id=group.id,
        task_id=group.task_id,
        policy=group.policy,
        status=group.status.value,
        reason=row.reason,
        created_at=group.created_at,
        completed_at=row.completed_at,
        rewards=tuple(total_reward(rollout) for rollout in group.rollouts),
        oldest_version=oldest,
        newest_version=newest,
        step=row.acked_step,
        failures=group.failures,
        tags=group.tags,
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
    if len(firsts) < 2:
        return 0
    length = min(map(len, firsts))
    differs = np.zeros(length, np.bool_)
    for ids in firsts[1:]:
        differs |= firsts[0][:length] != ids[:length]
    return int(differs.argmax()) if differs.any() else length
