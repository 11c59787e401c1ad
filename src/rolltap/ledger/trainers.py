"""The trainer's side of the ledger: whole groups with their trajectories, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set

import sqlalchemy as sa

from rolltap.contract.base import check_ttl
from rolltap.contract.leases import Lease, LeasedGroup, RolloutRecord
from rolltap.contract.trainer import LeaseRequest, Rewind, Rewound
from rolltap.errors import AlignmentError, RecordCorrupt
from rolltap.ledger import dead_letters, leases
from rolltap.ledger.base import DeadLetter, TrainedVersions
from rolltap.ledger.claims import ClaimedGroups, claim, count_ready, return_group
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.replay import claim_replay
from rolltap.ledger.rows import load_groups, load_tasks, total_reward, trained_rollouts
from rolltap.ledger.schema import leases as lease_rows
from rolltap.ledger.schema import policies as policy_rows
from rolltap.ledger.stale_tokens import without_stale
from rolltap.ledger.unit_of_work import Tx, UnitOfWork, wait_for
from rolltap.types import NO_VERSION, Group, Scoring, Task, Trajectory

GROUPS_AT_ONCE = 16
"""How many groups' sessions are read and rebuilt together."""


class Trainers:
    """Leases in and out. See `rolltap.ledger.leases` for what a trainer must keep to."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def lease(self, request: LeaseRequest) -> Lease:
        """Groups for the trainer. Without a group the lease has token 0.

        With `request.replay`: acknowledged groups, whose state does not change, at once.
        """
        if request.replay is not None:
            replay = request.replay
            claimed = await self._uow.transact(lambda tx: claim_replay(tx, request, replay))
            return await self._delivered(request, claimed)
        enough = min(request.at_least or request.groups, request.groups) if request.wait else 1
        claimed = await self._uow.transact(lambda tx: claim(tx, request, at_least=enough))
        if request.wait and not claimed.group_ids:
            await self._until_ready(request, enough)
            claimed = await self._uow.transact(lambda tx: claim(tx, request))
        return await self._delivered(request, claimed)

    async def _until_ready(self, request: LeaseRequest, enough: int) -> None:
        """Returns when `enough` groups are ready, or after `request.wait` seconds."""
        deadline = time.monotonic() + request.wait
        while (left := deadline - time.monotonic()) > 0:
            ticket = self._uow.ready.ticket()
            if await self._uow.query(lambda tx: count_ready(tx, request)) >= enough:
                return
            await wait_for(ticket, min(left, self._uow.settings.poll))

    async def extend(self, lease: LeaseKey, ttl: float | None = None) -> float:
        """The lease holds for `ttl` seconds from now, which are returned."""
        ttl = self._uow.settings.lease_ttl if ttl is None else ttl
        check_ttl(ttl)
        return await self._uow.transact(lambda tx: leases.extend(tx, lease, ttl))

    async def acknowledge(self, lease: LeaseKey, step: int) -> int:
        """The lease's groups are part of step `step`: they are never leased again, except by a rewind or as replay."""
        return await self._uow.transact(lambda tx: leases.acknowledge(tx, lease, step))

    async def refuse(self, lease: LeaseKey, reason: str, blamed: Sequence[str] = ()) -> int:
        """The trainer could not use the lease's groups; `blamed` (default: all) count a failure. Returns the dead."""
        settings = self._uow.settings
        return await self._uow.transact(lambda tx: leases.refuse(tx, lease, reason, blamed, settings))

    async def release(self, lease: LeaseKey) -> None:
        """The lease was never used: its groups are ready again, and no failure is counted."""
        await self._uow.transact(lambda tx: leases.release(tx, lease))

    async def rewind(self, trainer: str, restored: Rewind) -> Rewound:
        """After a checkpoint was restored: what came after it comes back, and the trainer owns its policies."""
        return await self._uow.transact(lambda tx: leases.rewind(tx, trainer, restored))

    async def policies_of_lease(self, lease_id: str) -> Set[str]:
        """The policy of a lease's groups; none if there is no such lease."""
        return await self._uow.query(lambda tx: _policies_where(tx, lease_rows.c.id == lease_id))

    async def policies_of_trainer(self, trainer: str) -> Set[str]:
        """The policies that the trainer owns or has ever leased groups of."""
        owned = sa.select(policy_rows.c.name).where(policy_rows.c.owner == trainer)
        return await self._uow.query(
            lambda tx: _policies_where(tx, lease_rows.c.trainer == trainer) | {row.name for row in tx.all(owned)}
        )

    async def dead_letters(self, policy: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        return await self._uow.query(lambda tx: dead_letters.listed(tx, policy, limit))

    async def revive(self, group_id: str) -> None:
        """The dead group is ready again, its failures forgotten."""
        await self._uow.transact(lambda tx: dead_letters.revive(tx, group_id))

    async def _delivered(self, request: LeaseRequest, claimed: ClaimedGroups) -> Lease:
        """The claim with its trajectories. A group that can't be rebuilt is taken out and counts a failure."""
        claimed_at = time.monotonic()
        ids = claimed.group_ids
        loaded, tasks, trained = await self._uow.query(
            lambda tx: (load_groups(tx, ids), load_tasks(tx, ids), trained_rollouts(tx, ids))
        )
        delivered: list[LeasedGroup] = []
        for start in range(0, len(loaded), GROUPS_AT_ONCE):
            delivered += await self._rebuilt(loaded[start : start + GROUPS_AT_ONCE], tasks, trained, claimed)
        return Lease(
            id=claimed.id,
            trainer=request.trainer,
            policy=request.policy,
            token=claimed.token,
            expires_in=max(0.0, request.ttl - (time.monotonic() - claimed_at)),
            policy_version=claimed.history.version,
            groups=tuple(delivered),
        )

    async def _rebuilt(
        self, groups: Sequence[Group], tasks: Mapping[str, Task], trained: Set[str], claimed: ClaimedGroups
    ) -> list[LeasedGroup]:
        """The groups with their trajectories, read together; one by one if one of them can't be rebuilt.

        `trained` are the rollouts that had tokens to train when they ended.
        """
        session_ids = [session_id for group in groups for session_id in _sessions(group)]
        try:
            trajectories = dict(zip(session_ids, await self._uow.trajectories(session_ids), strict=True))
            for group in groups:
                _check_kept(group, trajectories, trained)
        except (RecordCorrupt, AlignmentError) as error:
            if len(groups) > 1:
                return [leased for group in groups for leased in await self._rebuilt([group], tasks, trained, claimed)]
            await self._return(groups[0].id, claimed, f"{error.code}: {error.message}")
            return []
        if (most := claimed.mask_beyond) is not None:
            trajectories = {id: without_stale(one, claimed.history, most) for id, one in trajectories.items()}
        return [_leased_group(group, tasks[group.id], trajectories, claimed) for group in groups]

    async def _return(self, group_id: str, claimed: ClaimedGroups, reason: str) -> None:
        settings = self._uow.settings
        await self._uow.transact(lambda tx: return_group(tx, group_id, claimed.token, reason, settings))


def _policies_where(tx: Tx, which: sa.ColumnElement[bool]) -> set[str]:
    return {row.policy for row in tx.all(sa.select(lease_rows.c.policy).where(which).distinct())}


def _sessions(group: Group) -> list[str]:
    """The sessions whose trajectories a trainer needs."""
    return [
        rollout.session_id
        for rollout in group.rollouts
        if rollout.session_id and rollout.scoring is not Scoring.UNSCORABLE
    ]


def _check_kept(group: Group, trajectories: Mapping[str, Trajectory], trained: Set[str]) -> None:
    """`RecordCorrupt` where a rollout that had tokens to train has none any more: they were removed from the log."""
    for rollout in group.rollouts:
        trajectory = trajectories.get(rollout.session_id or "")
        if rollout.id in trained and trajectory is not None and not trajectory.segments:
            raise RecordCorrupt(f"rollout {rollout.id}: the calls of session {rollout.session_id} were removed")


def _leased_group(
    group: Group, task: Task, trajectories: Mapping[str, Trajectory], claimed: ClaimedGroups
) -> LeasedGroup:
    """`trajectories` are by session id; an unscorable rollout gets an empty one."""
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
        staleness=0 if oldest == NO_VERSION else claimed.history.behind(oldest),
        replay=claimed.replay,
    )
