"""Rebuilds trajectories from the call log for the ledger, in this or another process. Read-only.

A server does this in another process (`rolltap.proxy.reading_process`), as it takes much more CPU time than the
ledger's own work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rolltap.calllog.database import Database, database_clock
from rolltap.contract.trainer import Lease, LeasedGroup, LeaseRequest, RolloutRecord
from rolltap.errors import AlignmentError, RecordCorrupt
from rolltap.ledger.base import TrainedVersions, TrajectoriesOf
from rolltap.ledger.masking import without_late_calls, without_stale
from rolltap.ledger.open_leases import OpenedLease
from rolltap.ledger.rows import load_groups, load_tasks, load_trained_calls, total_reward
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import NO_VERSION, Group, Scoring, Task, Trajectory

GROUPS_AT_ONCE = 16
"""Number of groups whose sessions are read and rebuilt together."""

TrainedCalls = Mapping[str, Sequence[str]]
"""The calls that each rollout had to train when it ended, by rollout id. Its reward knows no other calls: one that was
under way then, and completed later, is not trained."""


@dataclass(frozen=True, slots=True)
class BrokenGroups:
    """Groups of a lease that cannot be rebuilt, with the reason by group id."""

    reasons: Mapping[str, str]


class Rebuilder(Protocol):
    """Rebuilds the trajectories of sessions, for the ledger."""

    async def trained_versions(self, session_id: str) -> TrainedVersions:
        """The trained versions of an ended rollout. Raises `RecordCorrupt` or `AlignmentError`."""
        ...

    async def lease(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Lease | BrokenGroups:
        """The lease with its groups' trajectories. `opened_at`: seconds on this machine's monotonic clock."""
        ...


class LocalRebuilder:
    """Rebuilds in this process. It only reads `database`; `trajectories` come from the call log."""

    def __init__(self, database: Database, trajectories: TrajectoriesOf) -> None:
        self._database = database
        self._trajectories = trajectories

    async def trained_versions(self, session_id: str) -> TrainedVersions:
        (trajectory,) = await self._trajectories([session_id])
        return TrainedVersions.of(trajectory)

    async def lease(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Lease | BrokenGroups:
        ids = opened.group_ids

        def load(tx: Tx) -> tuple[Sequence[Group], Mapping[str, Task], TrainedCalls]:
            return load_groups(tx, ids), load_tasks(tx, ids), load_trained_calls(tx, ids)

        groups, tasks, trained = await self._database.query(
            lambda connection: load(Tx(connection, database_clock(connection)))
        )
        groups = [_score_tampered(group, request.tampered) for group in groups]
        leased: list[LeasedGroup] = []
        broken: dict[str, str] = {}
        for start in range(0, len(groups), GROUPS_AT_ONCE):
            leased += await self._rebuilt(groups[start : start + GROUPS_AT_ONCE], tasks, trained, opened, broken)
        if broken:
            return BrokenGroups(broken)
        return Lease(
            id=opened.id,
            trainer=request.trainer,
            policy=request.policy,
            token=opened.token,
            expires_in=max(0.0, request.ttl - (time.monotonic() - opened_at)),
            policy_version=opened.history.version,
            groups=tuple(leased),
        )

    async def _rebuilt(
        self,
        groups: Sequence[Group],
        tasks: Mapping[str, Task],
        trained: TrainedCalls,
        opened: OpenedLease,
        broken: dict[str, str],
    ) -> list[LeasedGroup]:
        """The groups with their trajectories. They are read together, or one by one if one of them cannot be rebuilt.

        Adds groups that cannot be rebuilt to `broken`.
        """
        session_ids = [session_id for group in groups for session_id in _sessions(group)]
        try:
            trajectories = dict(zip(session_ids, await self._trajectories(session_ids), strict=True))
            for group in groups:
                _check_not_pruned(group, trajectories, trained)
        except (RecordCorrupt, AlignmentError) as error:
            if len(groups) == 1:
                broken[groups[0].id] = f"{error.code}: {error.message}"
                return []
            return [one for group in groups for one in await self._rebuilt([group], tasks, trained, opened, broken)]
        scored = [rollout for group in groups for rollout in group.rollouts if rollout.scoring is Scoring.SCORED]
        for rollout in scored:
            if rollout.session_id in trajectories:
                trajectory = trajectories[rollout.session_id]
                trajectories[rollout.session_id] = without_late_calls(trajectory, frozenset(trained[rollout.id]))
        if (most := opened.mask_beyond) is not None:
            trajectories = {id: without_stale(one, opened.history, most) for id, one in trajectories.items()}
        return [_leased_group(group, tasks[group.id], trajectories, opened) for group in groups]


def _sessions(group: Group) -> list[str]:
    """The sessions whose trajectories a trainer needs."""
    return [
        rollout.session_id
        for rollout in group.rollouts
        if rollout.session_id and rollout.scoring is not Scoring.UNSCORABLE
    ]


def _score_tampered(group: Group, tampered: str) -> Group:
    """The group with the scoring of tampered rollouts set by the option `tampered` ("keep", "drop" or "mask")."""
    if tampered == "keep" or not any(rollout.tampering for rollout in group.rollouts):
        return group
    counts_as = Scoring.UNSCORABLE if tampered == "drop" else Scoring.MASKED
    rollouts = (
        replace(rollout, scoring=counts_as)
        if rollout.tampering and rollout.scoring is not Scoring.UNSCORABLE
        else rollout
        for rollout in group.rollouts
    )
    return replace(group, rollouts=tuple(rollouts))


def _check_not_pruned(group: Group, trajectories: Mapping[str, Trajectory], trained: TrainedCalls) -> None:
    """Raises `RecordCorrupt` if the calls of a rollout with tokens to train were removed from the log."""
    for rollout in group.rollouts:
        trajectory = trajectories.get(rollout.session_id or "")
        if trained[rollout.id] and trajectory is not None and not trajectory.segments:
            raise RecordCorrupt(f"rollout {rollout.id}: the calls of session {rollout.session_id} were removed")


def _leased_group(group: Group, task: Task, trajectories: Mapping[str, Trajectory], opened: OpenedLease) -> LeasedGroup:
    """The leased group. `trajectories` is by session id; an unscorable rollout gets an empty trajectory."""
    records = tuple(
        RolloutRecord(
            rollout,
            trajectories.get(rollout.session_id or "") or Trajectory(rollout.session_id or "", (), (), {}),
            total_reward(rollout),
        )
        for rollout in group.rollouts
    )
    trained = [TrainedVersions.of(record.trajectory) for record in records if record.rollout.scoring is Scoring.SCORED]
    known = [versions for versions in trained if versions.oldest != NO_VERSION]
    oldest = min((versions.oldest for versions in known), default=NO_VERSION)
    return LeasedGroup(
        group=group,
        task=task,
        rollouts=records,
        oldest_version=oldest,
        newest_version=max((versions.newest for versions in known), default=NO_VERSION),
        staleness=0 if oldest == NO_VERSION else opened.history.behind(oldest),
        replay=opened.replay,
    )
