"""The trainer's side of the ledger: leases on whole groups with their trajectories."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

import sqlalchemy as sa

from rolltap.calllog.annotations import AnnotationLine
from rolltap.contract.base import check_ttl
from rolltap.contract.trainer import AnnotateLease, Lease, LeaseRequest, Rewind, Rewound
from rolltap.errors import StoreError
from rolltap.ledger import annotating, dead_letters, leases
from rolltap.ledger.base import DeadLetter
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.open_leases import OpenedLease, count_ready, end_undelivered, open_ready_lease, return_group
from rolltap.ledger.policies import policy_row
from rolltap.ledger.rebuilding import BrokenGroups
from rolltap.ledger.replay import open_replay_lease
from rolltap.ledger.schema import leases as lease_rows
from rolltap.ledger.schema import policies as policy_rows
from rolltap.ledger.unit_of_work import Tx, UnitOfWork, wait_for

L = TypeVar("L", covariant=True)


class BuildLease(Protocol[L]):
    """Builds the lease to deliver. See `rolltap.ledger.rebuilding.Rebuilder.lease`."""

    async def __call__(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> L | BrokenGroups: ...


class Trainers:
    """Leases for trainers. `rolltap.ledger.leases` has the rules that a trainer must follow."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def lease(self, request: LeaseRequest) -> Lease:
        """Leases groups to the trainer. If there are none, the lease has token 0.

        With `request.replay` it leases acknowledged groups, without waiting and without changing their state.
        """
        lease = await self.built(request, self._uow.rebuilder.lease)
        if lease is not None:
            return lease
        policy = await self._uow.query(lambda tx: policy_row(tx, request.policy))
        return Lease("", request.trainer, request.policy, 0, request.ttl, policy.version, ())

    async def built(self, request: LeaseRequest, build: BuildLease[L]) -> L | None:
        """Opens a lease and returns the result of `build`; None if there are no groups.

        A group that cannot be rebuilt is removed from the lease and counts a failure. A lease that is not delivered
        ends at once: its trainer does not know it.
        """
        opened, opened_at = await self._open(request), time.monotonic()
        try:
            while opened.group_ids:
                lease = await build(request, opened, opened_at)
                if not isinstance(lease, BrokenGroups):
                    return lease
                await self._return(opened, lease.reasons)
                remaining_ids = tuple(id for id in opened.group_ids if id not in lease.reasons)
                opened = replace(opened, group_ids=remaining_ids)
        except BaseException:
            await self._undelivered(opened)
            raise
        if opened.token:
            await self._undelivered(opened)
        return None

    async def _undelivered(self, opened: OpenedLease) -> None:
        """Ends the lease, also if this request is being cancelled. If the store is away, the lease expires later."""
        with suppress(StoreError):
            await asyncio.shield(self._uow.transact(lambda tx: end_undelivered(tx, opened.token)))

    async def _open(self, request: LeaseRequest) -> OpenedLease:
        if request.replay is not None:
            replay = request.replay
            return await self._uow.transact(lambda tx: open_replay_lease(tx, request, replay))
        enough = min(request.at_least or request.groups, request.groups) if request.wait else 1
        opened = await self._uow.transact(lambda tx: open_ready_lease(tx, request, at_least=enough))
        if request.wait and not opened.group_ids:
            await self._until_ready(request, enough)
            opened = await self._uow.transact(lambda tx: open_ready_lease(tx, request))
        return opened

    async def _return(self, opened: OpenedLease, reasons: Mapping[str, str]) -> None:
        settings = self._uow.settings

        def work(tx: Tx) -> None:
            for group_id, reason in reasons.items():
                return_group(tx, group_id, opened.token, reason, settings)

        await self._uow.transact(work)

    async def _until_ready(self, request: LeaseRequest, enough: int) -> None:
        """Waits until `enough` groups are ready, at most `request.wait` seconds."""
        deadline = time.monotonic() + request.wait
        while (remaining_s := deadline - time.monotonic()) > 0:
            ticket = self._uow.ready.ticket()
            if await self._uow.query(lambda tx: count_ready(tx, request)) >= enough:
                return
            await wait_for(ticket, min(remaining_s, self._uow.settings.poll))

    async def extend(self, lease: LeaseKey, ttl: float | None = None) -> float:
        """Extends the lease to `ttl` seconds from now; returns `ttl`."""
        ttl = self._uow.settings.lease_ttl if ttl is None else ttl
        check_ttl(ttl)
        return await self._uow.transact(lambda tx: leases.extend(tx, lease, ttl))

    async def acknowledge(self, lease: LeaseKey, step: int) -> int:
        """Records that the lease's groups are part of step `step`. Only a rewind or a replay leases them again."""
        return await self._uow.transact(lambda tx: leases.acknowledge(tx, lease, step))

    async def refuse(self, lease: LeaseKey, reason: str, blamed: Sequence[str] = ()) -> int:
        """Ends a lease that the trainer could not use. `blamed` groups (default: all) count a failure.

        Returns the number of groups that are dead now.
        """
        settings = self._uow.settings
        return await self._uow.transact(lambda tx: leases.refuse(tx, lease, reason, blamed, settings))

    async def release(self, lease: LeaseKey) -> None:
        """Ends an unused lease: its groups are ready again, without counting a failure."""
        await self._uow.transact(lambda tx: leases.release(tx, lease))

    async def annotate(self, lease: LeaseKey, posted: AnnotateLease) -> tuple[str, Sequence[AnnotationLine]]:
        """Appends annotations of the lease's calls; returns the policy and the new annotations."""
        return await self._uow.transact(lambda tx: annotating.annotate(tx, lease, posted))

    async def rewind(self, trainer: str, restored: Rewind) -> Rewound:
        """Rewinds to a restored checkpoint: later groups become available again, and the trainer owns its policies."""
        return await self._uow.transact(lambda tx: leases.rewind(tx, trainer, restored))

    async def policies_of_lease(self, lease_id: str) -> Set[str]:
        """The policy of a lease, as a set; empty if there is no such lease."""
        return await self._uow.query(lambda tx: _policies_where(tx, lease_rows.c.id == lease_id))

    async def policies_of_trainer(self, trainer: str) -> Set[str]:
        """The policies that the trainer owns or has ever leased."""
        owned = sa.select(policy_rows.c.name).where(policy_rows.c.owner == trainer)
        return await self._uow.query(
            lambda tx: _policies_where(tx, lease_rows.c.trainer == trainer) | {row.name for row in tx.all(owned)}
        )

    async def dead_letters(self, policy: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        return await self._uow.query(lambda tx: dead_letters.listed(tx, policy, limit))

    async def revive(self, group_id: str) -> None:
        """Makes a dead group ready again and resets its failures."""
        await self._uow.transact(lambda tx: dead_letters.revive(tx, group_id))


def _policies_where(tx: Tx, which: sa.ColumnElement[bool]) -> set[str]:
    return {row.policy for row in tx.all(sa.select(lease_rows.c.policy).where(which).distinct())}
