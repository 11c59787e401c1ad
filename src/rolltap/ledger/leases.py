"""Leases: how a trainer gets whole groups with their trajectories, and how a lease ends.

A lease is a row with an expiry by the database's clock. Its groups refer to it by its fencing token, a number that only
grows. No transaction stays open while a trainer works. A replay leases acknowledged groups, which stay acknowledged.

Delivery is at least once and the effect exactly once if a trainer follows three rules:

1. It acknowledges a lease *before* it applies the lease's update, with the step that the update leads to. If the
   acknowledgement is refused, it discards the update.
2. After restoring a checkpoint of step s it first calls `rewind(trainer, s, versions)`, with the checkpoint's weight
   version of each policy. Groups acknowledged after s are not part of its weights and become available again, and so do
   the groups of its open leases. Versions after the checkpoint's are abandoned.
3. It keeps its name and its run over restarts, and sends the incarnation of its last rewind with every call. A process
   of an older incarnation is refused, and so is another trainer (`rolltap.ledger.policies`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from rolltap.calllog.annotations import AnnotationSource, append_annotations
from rolltap.calllog.schema import sessions
from rolltap.contract.base import check_ttl
from rolltap.contract.operations import current_try
from rolltap.contract.trainer import (
    AnnotateLease,
    AnnotationLine,
    Lease,
    LeaseRequest,
    Replay,
    Rewind,
    Rewound,
    TrainerStatus,
)
from rolltap.errors import InvalidRequest, LeaseLost, StepRegression, StoreError
from rolltap.ids import new_id
from rolltap.ledger.policies import (
    VersionHistory,
    admit,
    check_owner,
    end_foreign_control,
    history_of,
    last_acknowledged,
    lock_incarnation,
    locked_policy,
    new_incarnation,
    own,
    policy_row,
    restore,
)
from rolltap.ledger.rebuilding import BrokenGroups, OpenedLease, Rebuilder
from rolltap.ledger.schema import (
    NOTHING_TO_TRAIN,
    OWNER,
    demands,
    groups,
    lease_groups,
    leases,
    policies,
    pruned_groups,
    rollouts,
    tasks,
    trainers,
)
from rolltap.ledger.unit_of_work import LedgerSettings, Tx, UnitOfWork
from rolltap.types import GroupStatus

L = TypeVar("L", covariant=True)


class BuildLease(Protocol[L]):
    """Builds the lease to deliver. See `rolltap.ledger.rebuilding.Rebuilder.lease`."""

    async def __call__(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> L | BrokenGroups: ...


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """The credentials for a call on a lease: its id, its fencing token and the trainer's incarnation."""

    id: str
    token: int
    incarnation: int = 0


class Trainers:
    """Leases for trainers. The module's text has the rules that a trainer must follow."""

    def __init__(self, uow: UnitOfWork, rebuilder: Rebuilder) -> None:
        self._uow = uow
        self._rebuilder = rebuilder

    async def lease(self, request: LeaseRequest) -> Lease:
        """Leases groups to the trainer. If there are none, the lease has token 0.

        With `request.replay` it leases acknowledged groups, without waiting and without changing their state.
        """
        lease = await self.built(request, self._rebuilder.lease)
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
                back = partial(return_groups, token=opened.token, reasons=lease.reasons, settings=self._uow.settings)
                await self._uow.transact(back)
                opened = replace(opened, group_ids=tuple(id for id in opened.group_ids if id not in lease.reasons))
        except BaseException:
            await self._undelivered(opened)
            raise
        if opened.token:
            await self._undelivered(opened)
        return None

    async def _open(self, request: LeaseRequest) -> OpenedLease:
        """Opens the lease, at the latest after `request.wait` seconds; before that, only on `at_least` groups."""
        if request.replay is not None:
            replay = request.replay
            return await self._uow.transact(lambda tx: open_replay_lease(tx, request, replay))
        enough = min(request.at_least or request.groups, request.groups) if request.wait else 1
        opened = await self._uow.transact(lambda tx: open_ready_lease(tx, request, at_least=enough))
        if opened.group_ids or not request.wait:
            return opened
        deadline = time.monotonic() + request.wait
        while (remaining_s := deadline - time.monotonic()) > 0:
            ticket = self._uow.ready.ticket()
            if await self._uow.query(lambda tx: count_ready(tx, request)) >= enough:
                break
            await ticket.wait_at_most(min(remaining_s, self._uow.settings.poll))
        return await self._uow.transact(lambda tx: open_ready_lease(tx, request))

    async def _undelivered(self, opened: OpenedLease) -> None:
        """Ends the lease, also if this request is being cancelled. If the store is away, the lease expires later."""

        async def end() -> None:
            current_try.set(None)  # this try opened it: no later one ends it
            await self._uow.transact(lambda tx: end_undelivered(tx, opened.token))

        with suppress(StoreError):
            await asyncio.shield(end())

    async def extend(self, key: LeaseKey, ttl: float | None = None) -> float:
        """Extends the lease to `ttl` seconds from now; returns `ttl`."""
        seconds = self._uow.settings.lease_ttl if ttl is None else ttl
        check_ttl(seconds)

        def work(tx: Tx) -> None:
            _open_lease(tx, key)
            tx.run(sa.update(leases).where(leases.c.id == key.id).values(expires_at=tx.now + seconds))

        await self._uow.transact(work)
        return seconds

    async def acknowledge(self, key: LeaseKey, step: int) -> int:
        """Records that the lease's groups are part of step `step`. Only a rewind or a replay leases them again."""
        return await self._uow.transact(lambda tx: acknowledge(tx, key, step))

    async def refuse(self, key: LeaseKey, reason: str, blamed: Sequence[str] = ()) -> int:
        """Ends a lease that the trainer could not use. `blamed` groups (default: all) count a failure.

        Returns the number of groups that are dead now.
        """
        return await self._uow.transact(lambda tx: refuse(tx, key, reason, blamed, self._uow.settings))

    async def release(self, key: LeaseKey) -> None:
        """Ends an unused lease: its groups are ready again, without counting a failure."""
        await self._uow.transact(lambda tx: end_lease(tx, _open_lease(tx, key), "released"))

    async def annotate(self, key: LeaseKey, posted: AnnotateLease) -> tuple[str, Sequence[AnnotationLine]]:
        """Appends annotations of the lease's calls; returns the policy and the new annotations."""
        return await self._uow.transact(lambda tx: annotate(tx, key, posted))

    async def status(self, trainer: str) -> TrainerStatus:
        """The trainer's incarnation, run and step; those of a new one if the name is unknown."""
        columns = (trainers.c.incarnation, trainers.c.run, trainers.c.step)
        named = sa.select(*columns).where(trainers.c.name == trainer)
        row = await self._uow.query(lambda tx: tx.first(named))
        return TrainerStatus() if row is None else TrainerStatus(*row)

    async def rewind(self, trainer: str, restored: Rewind) -> Rewound:
        """Rewinds to a restored checkpoint: later groups become available again, and the trainer owns its policies."""
        return await self._uow.transact(lambda tx: rewind(tx, trainer, restored))

    async def policies_of_lease(self, lease_id: str) -> Set[str]:
        """The policy of a lease, as a set; empty if there is no such lease."""
        leased = sa.select(leases.c.policy).where(leases.c.id == lease_id)
        return await self._uow.query(lambda tx: {row.policy for row in tx.all(leased)})

    async def policies_of_trainer(self, trainer: str) -> Set[str]:
        """The policies that the trainer owns or has ever leased."""
        leased = sa.select(leases.c.policy).where(leases.c.trainer == trainer)
        either = leased.union(sa.select(policies.c.name).where(policies.c.owner == trainer))
        return await self._uow.query(lambda tx: {row.policy for row in tx.all(either)})


def open_ready_lease(tx: Tx, request: LeaseRequest, *, at_least: int = 1) -> OpenedLease:
    """Opens a lease on ready groups, the highest priority first, then the longest ready; on none if fewer than
    `at_least` are ready.

    Also records the trainer's demand, ends expired leases, and retires groups that are empty or too stale.
    """
    history = admit(tx, request.policy, request.trainer, request.incarnation)
    usable = _fresh_enough(request, history)
    _note_demand(tx, request)
    expire(tx)
    # A step on groups without a trained token would change no weights and age all others. They are dropped here, not
    # when they complete: a policy without a trainer has groups for exports only.
    for row in _retire(tx, request.policy, groups.c.oldest_version < 0, GroupStatus.DROPPED, NOTHING_TO_TRAIN):
        tx.note("group_dropped", row.id, reason=NOTHING_TO_TRAIN)
    if request.max_staleness is not None and request.stale != "keep":
        for row in _retire(tx, request.policy, sa.not_(usable), GroupStatus.STALE, "too stale"):
            tx.note("group_stale", row.id, policy=request.policy, oldest_version=row.oldest_version)
    ready = (
        sa.select(groups.c.id)
        .where(groups.c.policy == request.policy, groups.c.status == GroupStatus.COMPLETE)
        .where(groups.c.oldest_version >= 0, usable)
        .order_by(groups.c.priority.desc(), groups.c.completed_at, groups.c.id)
        .limit(request.groups)
        .with_for_update(skip_locked=True, key_share=True)
    )
    group_ids = tuple(row.id for row in tx.all(ready))
    if len(group_ids) < at_least:
        return OpenedLease("", 0, (), history)
    token, lease_id = _insert_lease(tx, request, group_ids, replay=False)
    tx.run(sa.update(groups).where(groups.c.id.in_(group_ids)).values(status=GroupStatus.LEASED, lease_token=token))
    mask_beyond = request.max_staleness if request.stale == "mask" else None
    return OpenedLease(lease_id, token, group_ids, history, mask_beyond=mask_beyond)


def open_replay_lease(tx: Tx, request: LeaseRequest, replay: Replay) -> OpenedLease:
    """Opens a lease on acknowledged groups that match `replay`. They can be replayed any number of times."""
    history = admit(tx, request.policy, request.trainer, request.incarnation)
    matching = sa.select(groups.c.id, groups.c.tags).where(
        groups.c.policy == request.policy,
        groups.c.status == GroupStatus.ACKNOWLEDGED,
        groups.c.oldest_version >= 0,
        groups.c.oldest_version < history.oldest(replay.min_age - 1),
    )
    if replay.max_age is not None:
        matching = matching.where(_fresh(history, replay.max_age))
    if replay.min_reward is not None:
        matching = matching.where(groups.c.reward_mean >= replay.min_reward)
    if replay.max_reward is not None:
        matching = matching.where(groups.c.reward_mean <= replay.max_reward)
    newest = (groups.c.completed_at.desc(), groups.c.id.desc())
    matching = matching.order_by(*(newest if replay.order == "newest" else (sa.func.random(),)))
    tagged = (row.id for row in tx.connection.execute(matching) if set(replay.tags) <= set(row.tags))
    chosen = tuple(islice(tagged, request.groups))
    held = sa.select(groups.c.id).where(groups.c.id.in_(chosen)).with_for_update(read=True, key_share=True)
    there = {row.id for row in tx.all(held)}
    group_ids = tuple(id for id in chosen if id in there)  # the others were pruned meanwhile
    if not group_ids:
        return OpenedLease("", 0, (), history)
    token, lease_id = _insert_lease(tx, request, group_ids, replay=True)
    return OpenedLease(lease_id, token, group_ids, history, replay=True)


def count_ready(tx: Tx, request: LeaseRequest) -> int:
    """The number of groups that a lease would get, including those whose lease has expired."""
    expired = sa.select(leases.c.token).where(leases.c.status == "open", leases.c.expires_at <= tx.now)
    free = sa.or_(
        groups.c.status == GroupStatus.COMPLETE,
        sa.and_(groups.c.status == GroupStatus.LEASED, groups.c.lease_token.in_(expired)),
    )
    usable = _fresh_enough(request, history_of(tx, policy_row(tx, request.policy)))
    of_policy = sa.select(sa.func.count()).where(groups.c.policy == request.policy, groups.c.oldest_version >= 0)
    return tx.scalar(of_policy.where(usable, free))


def _fresh_enough(request: LeaseRequest, history: VersionHistory) -> sa.ColumnElement[bool]:
    """The condition for groups that are not too stale for the request."""
    if request.max_staleness is None:
        return sa.true()
    return (_partly_fresh if request.stale == "mask" else _fresh)(history, request.max_staleness)


def _fresh(history: VersionHistory, max_staleness: int) -> sa.ColumnElement[bool]:
    """The condition for groups without a trained token that is staler or of an abandoned version.

    Only a group's oldest and newest version are known. So a group counts as sampled from every version between them.
    """
    floor = history.oldest(max_staleness)
    without = [
        sa.or_(groups.c.oldest_version > last, groups.c.newest_version < first)
        for first, last in history.abandoned
        if last >= floor
    ]
    return sa.and_(groups.c.oldest_version >= floor, *without)


def _partly_fresh(history: VersionHistory, max_staleness: int) -> sa.ColumnElement[bool]:
    """The condition for groups that may have a fresh trained token."""
    floor = history.oldest(max_staleness)
    abandoned_only = [
        sa.and_(groups.c.oldest_version >= first, groups.c.newest_version <= last) for first, last in history.abandoned
    ]
    return sa.and_(groups.c.newest_version >= floor, *map(sa.not_, abandoned_only))


def _retire(
    tx: Tx, policy: str, which: sa.ColumnElement[bool], status: GroupStatus, reason: str
) -> Sequence[sa.Row[Any]]:
    """Takes the policy's complete groups `which` out of training; returns their ids and oldest versions."""
    complete = sa.select(groups.c.id, groups.c.oldest_version).where(
        groups.c.policy == policy, groups.c.status == GroupStatus.COMPLETE, which
    )
    rows = tx.all(complete.with_for_update(skip_locked=True, key_share=True))
    if rows:
        ids = [row.id for row in rows]
        tx.run(sa.update(groups).where(groups.c.id.in_(ids)).values(status=status, reason=reason))
    return rows


def _insert_lease(tx: Tx, request: LeaseRequest, group_ids: Sequence[str], *, replay: bool) -> tuple[int, str]:
    """Inserts a lease on the groups; returns its fencing token and id."""
    lease_id = new_id()
    values = {
        "id": lease_id,
        "trainer": request.trainer,
        "policy": request.policy,
        "replay": replay,
        "status": "open",
        "created_at": tx.now,
        "expires_at": tx.now + request.ttl,
    }
    token: int = tx.connection.execute(leases.insert().values(values).returning(leases.c.token)).scalar_one()
    rows = [{"token": token, "group_id": id, "position": position} for position, id in enumerate(group_ids)]
    tx.run(lease_groups.insert(), rows)
    tx.note("leased", lease_id, trainer=request.trainer, policy=request.policy, groups=list(group_ids), replay=replay)
    return token, lease_id


def _note_demand(tx: Tx, request: LeaseRequest) -> None:
    """Records that the trainer wants groups now, and how many at once, for backpressure."""
    groups_held = (
        sa.select(sa.func.count())
        .select_from(lease_groups.join(leases, leases.c.token == lease_groups.c.token))
        .where(leases.c.trainer == request.trainer, leases.c.policy == request.policy, leases.c.replay.is_(False))
        .where(leases.c.status == "open", leases.c.expires_at > tx.now)
    )
    values = {
        "batch": request.batch or request.groups + tx.scalar(groups_held),
        "max_staleness": request.max_staleness,
        "seen_at": tx.now,
    }
    if not tx.insert_new(demands, {"trainer": request.trainer, "policy": request.policy, **values}):
        mine = sa.and_(demands.c.trainer == request.trainer, demands.c.policy == request.policy)
        tx.run(sa.update(demands).where(mine).values(values))


def return_groups(tx: Tx, token: int, reasons: Mapping[str, str], settings: LedgerSettings) -> None:
    """Removes groups that cannot be delivered from their lease. Each counts a failure unless the lease is a replay."""
    for group_id, reason in reasons.items():
        tx.run(sa.delete(lease_groups).where(lease_groups.c.token == token, lease_groups.c.group_id == group_id))
        leased_group = sa.select(groups).where(groups.c.id == group_id, groups.c.lease_token == token)
        group = tx.first(leased_group.where(groups.c.status == GroupStatus.LEASED).with_for_update(key_share=True))
        if group is not None and not fail(tx, group, reason, settings):
            values = {"status": GroupStatus.COMPLETE, "lease_token": None}
            tx.run(sa.update(groups).where(groups.c.id == group_id).values(values))


def fail(tx: Tx, group: Any, reason: str, settings: LedgerSettings) -> bool:
    """Counts a failure of the group; True if it is dead now."""
    dead = group.failures + 1 >= settings.max_failures
    values: dict[str, Any] = {"failures": group.failures + 1, "reason": reason}
    if dead:
        values |= {"status": GroupStatus.DEAD, "lease_token": None}
        tx.note("group_dead", group.id, policy=group.policy, reason=reason)
    tx.run(sa.update(groups).where(groups.c.id == group.id).values(values))
    return dead


def expire(tx: Tx) -> int:
    """Ends expired leases; their groups are complete again. Returns the number of leases."""
    expired_leases = (
        sa.select(leases)
        .where(leases.c.status == "open", leases.c.expires_at <= tx.now)
        .order_by(leases.c.token)
        .with_for_update(skip_locked=True, key_share=True)
    )
    expired = tx.all(expired_leases)
    for lease in expired:
        end_lease(tx, lease, "expired")
        tx.note("lease_expired", lease.id, trainer=lease.trainer, policy=lease.policy)
    return len(expired)


def end_lease(tx: Tx, lease: Any, status: str) -> int:
    """Ends a lease without acknowledgement: its groups are complete again. Returns the number of groups."""
    tx.run(sa.update(leases).where(leases.c.token == lease.token).values(status=status))
    leased_groups = sa.update(groups).where(groups.c.lease_token == lease.token, groups.c.status == GroupStatus.LEASED)
    freed = tx.run(leased_groups.values(status=GroupStatus.COMPLETE, lease_token=None))
    if freed:
        tx.wake_trainers()
    return freed


def end_undelivered(tx: Tx, token: int) -> None:
    """Ends a lease that no trainer has received, unless a rewind has ended it."""
    lease = sa.select(leases).where(leases.c.token == token, leases.c.status == "open")
    row = tx.first(lease.with_for_update(key_share=True))
    if row is not None:
        end_lease(tx, row, "undelivered")
        tx.note("lease_undelivered", row.id, trainer=row.trainer, policy=row.policy)


def locked_lease(tx: Tx, key: LeaseKey) -> Any:
    """Locks the lease and its trainer; returns the lease's row.

    Raises `LeaseLost` for a wrong token, and `TrainerFenced` if the trainer has another incarnation or does not own the
    policy.
    """
    lease_id, token = key.id, key.token
    row = tx.first(sa.select(leases.c.trainer, leases.c.policy).where(leases.c.id == lease_id))
    if row is None:
        raise LeaseLost(f"no lease {lease_id!r}: it never was, or was pruned")
    lock_incarnation(tx, row.trainer, key.incarnation)
    check_owner(policy_row(tx, row.policy), row.trainer)
    lease = tx.first(sa.select(leases).where(leases.c.id == lease_id).with_for_update(key_share=True))
    if lease is None:  # it was pruned meanwhile
        raise LeaseLost(f"no lease {lease_id!r}")
    if lease.token != token:
        raise LeaseLost(f"lease {lease_id} has another fencing token than {token}", param="token")
    return lease


def _open_lease(tx: Tx, key: LeaseKey) -> Any:
    """Locks the lease, updates its trainer's `seen_at`, and returns its row. Raises `LeaseLost` if it is not open."""
    lease = locked_lease(tx, key)
    if lease.status != "open":
        raise LeaseLost(f"lease {key.id} is {lease.status}")
    if lease.expires_at <= tx.now:
        raise LeaseLost(f"lease {key.id} expired {tx.now - lease.expires_at:.1f} s ago; extend leases in time")
    of_trainer = sa.and_(demands.c.trainer == lease.trainer, demands.c.policy == lease.policy)
    tx.run(sa.update(demands).where(of_trainer).values(seen_at=tx.now))
    return lease


def acknowledge(tx: Tx, key: LeaseKey, step: int) -> int:
    """Records that the groups are part of the trainer's step `step`; returns their number. Idempotent."""
    lease, token = locked_lease(tx, key), key.token
    members = sa.select(lease_groups.c.group_id).where(lease_groups.c.token == token)
    if lease.status == "acknowledged" and lease.step == step:
        return len(tx.all(members))
    lease = _open_lease(tx, key)
    last = tx.scalar(sa.select(trainers.c.step).where(trainers.c.name == lease.trainer))
    if step < 0 or (last is not None and step < last):
        raise StepRegression(
            f"trainer {lease.trainer!r} has acknowledged step {last}; step {step} is behind it. "
            "After restoring a checkpoint, rewind first",
            param="step",
        )
    ended = {"status": "acknowledged", "step": step, "served": _served_before(tx, lease, step)}
    tx.run(sa.update(leases).where(leases.c.token == token).values(ended))
    tx.run(sa.update(trainers).where(trainers.c.name == lease.trainer).values(step=step))
    acknowledgement = {"acked_by": lease.trainer, "acked_step": step, "acked_at": tx.now}
    leased_groups = sa.update(groups).where(groups.c.lease_token == token, groups.c.status == GroupStatus.LEASED)
    tx.run(leased_groups.values(status=GroupStatus.ACKNOWLEDGED, **acknowledgement))
    tx.note("acknowledged", key.id, trainer=lease.trainer, policy=lease.policy, step=step)
    return len(tx.all(members))


def _served_before(tx: Tx, lease: Any, step: int) -> int | None:
    """The version that was served when the trainer first acknowledged groups for `step`; None for step 0, before which
    no weights are made."""
    before = last_acknowledged(tx, lease.trainer, lease.policy)
    if before is not None and before.step == step:
        return before.served
    return policy_row(tx, lease.policy).version if step else None


def refuse(tx: Tx, key: LeaseKey, reason: str, blamed: Sequence[str], settings: LedgerSettings) -> int:
    """Ends a lease whose groups the trainer could not use: they are ready again, or dead after too many failures.

    Only the `blamed` groups (default: all) count a failure; replayed groups do not change. Returns how many are dead
    now.
    """
    lease = _open_lease(tx, key)
    members = tx.all(sa.select(lease_groups.c.group_id).where(lease_groups.c.token == key.token))
    unknown = set(blamed) - {row.group_id for row in members}
    if unknown:
        raise InvalidRequest(f"lease {key.id} does not have the groups {', '.join(sorted(unknown))}", param="blamed")
    leased_groups = tx.all(
        sa.select(groups).where(groups.c.lease_token == key.token, groups.c.status == GroupStatus.LEASED)
    )
    dead = 0
    for row in leased_groups:
        failed = not blamed or row.id in blamed
        if failed:
            dead += fail(tx, row, reason, settings)
    end_lease(tx, lease, "refused")
    tx.note("refused", key.id, trainer=lease.trainer, policy=lease.policy, reason=reason)
    return dead


def rewind(tx: Tx, trainer: str, restored: Rewind) -> Rewound:
    """Makes the groups that the trainer acknowledged after the step, and those of its open leases, available again.

    The trainer continues as a new incarnation, which owns the policies. Later versions of the policies are abandoned,
    and other trainers' leases on them end, and other runs' controls.
    """
    step = restored.step
    row = new_incarnation(tx, trainer, restored)
    foreign: list[Any] = []
    versions: dict[str, int] = {}
    for name, version in sorted(restored.versions.items()):
        end_foreign_control(tx, name, restored.run)
        foreign += own(tx, locked_policy(tx, name), trainer, take_over=restored.take_over)
        versions[name] = restore(tx, name, version)
    for lease in foreign:
        end_lease(tx, lease, "taken over")
    mine = sa.select(leases).where(leases.c.trainer == trainer).order_by(leases.c.token).with_for_update(key_share=True)
    freed = sum(end_lease(tx, lease, "rewound") for lease in tx.all(mine.where(leases.c.status == "open")))
    after = sa.and_(leases.c.policy.in_(versions), leases.c.step > step)
    undone = tx.all(mine.where(leases.c.status == "acknowledged", after))
    tokens = [lease.token for lease in undone]
    tx.run(sa.update(leases).where(leases.c.token.in_(tokens)).values(status="rewound"))
    acked = sa.and_(groups.c.policy.in_(versions), groups.c.acked_by == trainer, groups.c.acked_step > step)
    back = sa.update(groups).where(acked, groups.c.status == GroupStatus.ACKNOWLEDGED)
    cleared = {"acked_by": None, "acked_step": None, "acked_at": None, "lease_token": None}
    returned = tx.run(back.values(status=GroupStatus.COMPLETE, **cleared))
    if row.step is not None and row.step > step:
        tx.run(sa.update(trainers).where(trainers.c.name == trainer).values(step=step))
    later = sa.and_(pruned_groups.c.acked_by == trainer, pruned_groups.c.acked_step > step)
    of_policies = sa.select(sa.func.count()).select_from(pruned_groups).where(pruned_groups.c.policy.in_(versions))
    pruned = tx.scalar(of_policies.where(later))
    done = {"acknowledged": returned, "leased": freed, "pruned": pruned}
    tx.note("rewound", trainer, step=step, incarnation=row.incarnation, **done)
    tx.wake_trainers()
    return Rewound(returned, freed, versions, row.incarnation, row.step, pruned)


def annotate(tx: Tx, key: LeaseKey, posted: AnnotateLease) -> tuple[str, list[AnnotationLine]]:
    """Appends annotations of the lease's calls, all or none; returns the lease's policy and the new annotations.

    A retry has no effect. After a crash the trainer rewinds and leases the groups again under another token.
    """
    lease = locked_lease(tx, key)
    if lease.status not in ("open", "acknowledged"):
        raise LeaseLost(f"lease {key.id} is {lease.status}")
    if lease.status == "open" and lease.expires_at <= tx.now:
        raise LeaseLost(f"lease {key.id} expired {tx.now - lease.expires_at:.1f} s ago; extend leases in time")
    source = AnnotationSource(
        token=lease.token,
        lease_id=lease.id,
        policy=lease.policy,
        trainer=lease.trainer,
        step=lease.step,
        version=posted.version,
        sessions=_sessions(tx, lease.token),
    )
    return lease.policy, append_annotations(tx.connection, tx.now, source, posted.calls)


def _sessions(tx: Tx, token: int) -> dict[str, tuple[str, str]]:
    """The sessions of a lease's rollouts, each with its group and harness."""
    query = (
        sa.select(rollouts.c.session_id, groups.c.id.label("group_id"), sessions.c.tags, tasks.c.spec)
        .join(groups, rollouts.c.group_id == OWNER)
        .join(lease_groups, lease_groups.c.group_id == groups.c.id)
        .join(tasks, tasks.c.digest == groups.c.task_digest)
        .join(sessions, sessions.c.id == rollouts.c.session_id)
        .where(lease_groups.c.token == token)
    )
    return {
        row.session_id: (row.group_id, str(json.loads(row.tags).get("harness") or row.spec.get("harness") or ""))
        for row in tx.all(query)
    }
