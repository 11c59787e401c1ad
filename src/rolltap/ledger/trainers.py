"""The trainer's side of the ledger: whole groups with their trajectories, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Protocol, TypeVar

import sqlalchemy as sa

from rolltap.calllog.annotations import AnnotationLine
from rolltap.contract.annotations import AnnotateLease
from rolltap.contract.base import check_ttl
from rolltap.contract.leases import Lease
from rolltap.contract.trainer import LeaseRequest, Rewind, Rewound
from rolltap.ledger import annotating, dead_letters, leases
from rolltap.ledger.base import DeadLetter
from rolltap.ledger.claims import ClaimedGroups, claim, count_ready, return_group
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.policies import policy_row
from rolltap.ledger.rebuilding import BrokenGroups
from rolltap.ledger.replay import claim_replay
from rolltap.ledger.schema import leases as lease_rows
from rolltap.ledger.schema import policies as policy_rows
from rolltap.ledger.unit_of_work import Tx, UnitOfWork, wait_for

L = TypeVar("L", covariant=True)


class BuildLease(Protocol[L]):
    """Makes a lease of claimed groups. See `rolltap.ledger.rebuilding.Rebuilder.lease`."""

    async def __call__(self, request: LeaseRequest, claimed: ClaimedGroups, claimed_at: float) -> L | BrokenGroups: ...


class Trainers:
    """Leases in and out. See `rolltap.ledger.leases` for what a trainer must keep to."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def lease(self, request: LeaseRequest) -> Lease:
        """Groups for the trainer. Without a group the lease has token 0.

        With `request.replay`: acknowledged groups, whose state does not change, at once.
        """
        lease = await self.built(request, self._uow.rebuilder.lease)
        if lease is not None:
            return lease
        policy = await self._uow.query(lambda tx: policy_row(tx, request.policy))
        return Lease("", request.trainer, request.policy, 0, request.ttl, policy.version, ())

    async def built(self, request: LeaseRequest, build: BuildLease[L]) -> L | None:
        """What `build` makes of the groups that the trainer gets; None if there are none.

        A group that can't be rebuilt is taken out and counts a failure.
        """
        claimed, claimed_at = await self._claimed(request), time.monotonic()
        while claimed.group_ids:
            lease = await build(request, claimed, claimed_at)
            if not isinstance(lease, BrokenGroups):
                return lease
            await self._return(claimed, lease.reasons)
            remaining_ids = tuple(id for id in claimed.group_ids if id not in lease.reasons)
            claimed = replace(claimed, group_ids=remaining_ids)
        return None

    async def _claimed(self, request: LeaseRequest) -> ClaimedGroups:
        if request.replay is not None:
            replay = request.replay
            return await self._uow.transact(lambda tx: claim_replay(tx, request, replay))
        enough = min(request.at_least or request.groups, request.groups) if request.wait else 1
        claimed = await self._uow.transact(lambda tx: claim(tx, request, at_least=enough))
        if request.wait and not claimed.group_ids:
            await self._until_ready(request, enough)
            claimed = await self._uow.transact(lambda tx: claim(tx, request))
        return claimed

    async def _return(self, claimed: ClaimedGroups, reasons: Mapping[str, str]) -> None:
        settings = self._uow.settings

        def work(tx: Tx) -> None:
            for group_id, reason in reasons.items():
                return_group(tx, group_id, claimed.token, reason, settings)

        await self._uow.transact(work)

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

    async def annotate(self, lease: LeaseKey, posted: AnnotateLease) -> tuple[str, Sequence[AnnotationLine]]:
        """What the trainer says of the lease's tokens; the policy, and the annotations that were not on record yet."""
        return await self._uow.transact(lambda tx: annotating.annotate(tx, lease, posted))

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


def _policies_where(tx: Tx, which: sa.ColumnElement[bool]) -> set[str]:
    return {row.policy for row in tx.all(sa.select(lease_rows.c.policy).where(which).distinct())}
