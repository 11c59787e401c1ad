"""Groups: opening (if there is room), cancelling and listing them, and those that trainers refused too often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from rolltap.contract.admin import FORK, Fork, GroupRule
from rolltap.contract.trainer import DeadLetter
from rolltap.decoding import convert
from rolltap.errors import InvalidRequest, LedgerError, RateLimited
from rolltap.ids import new_id
from rolltap.ledger.completion import drop_all, insert_rollouts, insert_sharing, leave_out, settle
from rolltap.ledger.policies import first_behind, lock_policies, room
from rolltap.ledger.rows import load_group, load_groups, locked_group, no_group, rule_json, task_digest
from rolltap.ledger.schema import OWNER, groups, pruned_groups, rollouts, tasks
from rolltap.ledger.unit_of_work import Tx, UnitOfWork
from rolltap.types import Group, GroupStatus, RolloutParent, Task

MAX_ROLLOUTS = 4096


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group to open. A greater `priority` is run and trained first.

    `policy` is the trained one. `roles` maps each role to its policy if there are several; `also` are the other ones
    that are trained, each with a group that shares the rollouts.
    """

    policy: str
    n: int
    task: Task
    tags: tuple[str, ...] = ()
    rule: GroupRule = field(default_factory=GroupRule)
    priority: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_ROLLOUTS:
            raise InvalidRequest(f"a group has 1 to {MAX_ROLLOUTS} rollouts, not {self.n}", param="n")
        self.rule.check(self.n, self.roles)
        parent_of(self.task)


class Groups:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def open(self, spec: GroupSpec, *, group_id: str | None = None) -> Group:
        """Opens a group of `spec.n` pending rollouts. The same `group_id` again returns the same group.

        Raises `RateLimited` if too many groups are outstanding for the policy's trainers.
        """
        id = group_id or new_id()

        def work(tx: Tx) -> Group:
            lock_policies(tx, spec.policy, spec.also)
            known = tx.first(sa.select(groups).where(groups.c.id == id))
            if known is not None:
                _check_same(tx, known, spec)
                return load_group(tx, id)
            if tx.first(sa.select(pruned_groups).where(pruned_groups.c.group_id == id)) is not None:
                raise LedgerError(f"{no_group(tx, id).message}; use a new id", param="id")
            settings = self._uow.settings
            for policy in (spec.policy, *spec.also):
                if room(tx, policy, settings.trainer_silence) == 0:
                    raise RateLimited(
                        f"policy {policy!r} has as many outstanding groups as its trainers can take; open this one "
                        "later",
                        retry_after=settings.open_retry_after,
                    )
            if spec.also and (behind := first_behind(tx, (spec.policy, *spec.also), settings)):
                raise RateLimited(
                    f"policy {behind!r} is behind at the barrier; open this group later",
                    retry_after=settings.open_retry_after,
                )
            insert_group(tx, id, spec, insert_task(tx, spec.task))
            return load_group(tx, id)

        return await self._uow.transact(work)

    async def get(self, group_id: str) -> Group:
        return await self._uow.query(lambda tx: load_group(tx, group_id))

    async def fork(self, parent: RolloutParent, n: int) -> Group:
        """Adds `n` pending rollouts that continue `parent` to the open group of its rollout. The same `parent.fork`
        again has no effect.

        They count as the group's rollouts: it waits for them, or is complete with as many usable ones as its rule says.
        Raises `LedgerError` if the group is not open any more, or if it has other rollouts of that `parent.fork`.
        """

        def work(tx: Tx) -> Group:
            _, group = locked_group(tx, parent.rollout_id)
            rows = tx.all(sa.select(rollouts.c.parent).where(rollouts.c.group_id == group.id))
            known = [row.parent for row in rows if row.parent is not None and row.parent.get("fork") == parent.fork]
            if parent.fork and known:
                if known != [asdict(parent)] * n:
                    raise LedgerError(f"fork {parent.fork} of the group is another one; use a new id", param="id")
                return load_group(tx, group.id)
            if group.status != GroupStatus.OPEN:
                raise LedgerError(f"group {group.id} is {group.status}; fork its rollouts while it is open")
            size = len(rows)
            if not 1 <= n <= MAX_ROLLOUTS - size:
                raise InvalidRequest(f"n: the group has {size} rollouts, and {MAX_ROLLOUTS} at most", param="n")
            insert_rollouts(tx, group.id, range(size, size + n), parent)
            tx.note("rollout_forked", parent.rollout_id, group_id=group.id, call_id=parent.call_id, at=parent.at, n=n)
            return load_group(tx, group.id)

        return await self._uow.transact(work)

    async def cancel(self, group_id: str, reason: str = "cancelled") -> Group:
        """Drops an open group, and those with the same rollouts, and cancels its rollouts that are not terminal.
        Cancelling it again has no effect.

        Raises `LedgerError` for a complete, leased or acknowledged group.
        """

        def work(tx: Tx) -> Group:
            owner = tx.scalar(sa.select(OWNER).where(groups.c.id == group_id)) or group_id
            group = locked_group_row(tx, owner)
            if group.status == GroupStatus.OPEN:
                rows = tx.all(sa.select(rollouts).where(rollouts.c.group_id == owner))
                leave_out(tx, [row.id for row in rows], rows, reason)
                drop_all(tx, owner, reason)
            elif group.status != GroupStatus.DROPPED:
                raise LedgerError(f"group {group_id} is {group.status}; only an open one can be cancelled")
            return load_group(tx, group_id)

        return await self._uow.transact(work)

    async def dead_letters(self, policy: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        """The dead groups, the oldest first."""
        dead = sa.select(groups).where(groups.c.status == GroupStatus.DEAD).order_by(groups.c.created_at).limit(limit)
        if policy is not None:
            dead = dead.where(groups.c.policy == policy)

        def work(tx: Tx) -> Sequence[DeadLetter]:
            rows = tx.all(dead)
            dead_groups = load_groups(tx, [row.id for row in rows])
            return [DeadLetter(group, row.reason) for group, row in zip(dead_groups, rows, strict=True)]

        return await self._uow.query(work)

    async def revive(self, group_id: str) -> None:
        """Makes a dead group ready again and resets its failures."""

        def work(tx: Tx) -> None:
            row = locked_group_row(tx, group_id)
            if row.status != GroupStatus.DEAD:
                raise LedgerError(f"group {group_id} is {row.status}, not dead")
            revived = {"status": GroupStatus.COMPLETE, "failures": 0, "reason": ""}
            tx.run(sa.update(groups).where(groups.c.id == group_id).values(revived))
            tx.note("group_revived", group_id, policy=row.policy)
            tx.wake_trainers()

        await self._uow.transact(work)

    async def settle_late(self) -> int:
        """Applies the rules of open groups whose deadline has passed; returns their number."""

        def work(tx: Tx) -> int:
            late = (
                sa.select(groups)
                .where(groups.c.status == GroupStatus.OPEN, groups.c.deadline_at <= tx.now)
                .order_by(groups.c.id)
                .limit(100)
                .with_for_update(skip_locked=True, key_share=True)
            )
            late_groups = tx.all(late)
            for group in late_groups:
                settle(tx, group, self._uow.settings)
            return len(late_groups)

        return await self._uow.transact(work)


def parent_of(task: Task) -> RolloutParent | None:
    """The call that all rollouts of the task continue: `fork` of its spec, with `rollout`, `call` and perhaps `at`.

    Raises `InvalidRequest` for another content.
    """
    if FORK not in task.spec:
        return None
    try:
        fork = convert(task.spec[FORK], Fork)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"task {task.id!r}: fork: {error}", param="task") from error
    return RolloutParent(fork.rollout, fork.call, fork.at)


def insert_task(tx: Tx, task: Task) -> str:
    """Stores the task unless it is stored already; returns its digest."""
    digest = task_digest(task)
    content = {"id": task.id, "instruction": task.instruction, "spec": dict(task.spec), "tags": list(task.tags)}
    tx.insert_new(tasks, {"digest": digest, **content})
    return digest


def insert_group(tx: Tx, id: str, spec: GroupSpec, task_digest: str, *, submission_id: str | None = None) -> None:
    """Inserts an open group of a stored task with its pending rollouts, and the groups that share them."""
    values = {
        "id": id,
        "task_id": spec.task.id,
        "task_digest": task_digest,
        "policy": spec.policy,
        "roles": dict(spec.roles) or None,
        "n": spec.n,
        "priority": spec.priority,
        "tags": list(spec.tags),
        "rule": rule_json(spec.rule),
        "status": GroupStatus.OPEN,
        "reason": "",
        "failures": 0,
        "created_at": tx.now,
        "deadline_at": None if spec.rule.deadline is None else tx.now + spec.rule.deadline,
        "generation": 1,
        "submission_id": submission_id,
    }
    tx.run(groups.insert().values(values))
    insert_sharing(tx, values, spec.also)
    insert_rollouts(tx, id, range(spec.n), parent_of(spec.task))
    tx.note("group_opened", id, policy=spec.policy, task_id=spec.task.id, n=spec.n)


def locked_group_row(tx: Tx, group_id: str) -> Any:
    row = tx.first(sa.select(groups).where(groups.c.id == group_id).with_for_update(key_share=True))
    if row is None:
        raise no_group(tx, group_id)
    return row


def _check_same(tx: Tx, known: Any, spec: GroupSpec) -> None:
    """Raises `LedgerError` if the group with this id was opened with another content."""
    roles = dict(spec.roles) or None
    requested = {"policy": spec.policy, "roles": roles, "n": spec.n, "task": task_digest(spec.task)}
    requested |= {"rule": rule_json(spec.rule), "policies": {spec.policy, *spec.also}}
    rule = {**known.rule, "scopes": tuple(known.rule["scopes"])}
    recorded = {"policy": known.policy, "roles": known.roles, "n": known.n, "task": known.task_digest, "rule": rule}
    sharing = sa.select(groups.c.policy).where(groups.c.shares == known.id)
    recorded["policies"] = {known.policy, *(row.policy for row in tx.all(sharing))}
    differing = [name for name, value in requested.items() if value != recorded[name]]
    if differing:
        raise LedgerError(
            f"group {known.id} was opened with another {' and '.join(differing)}; use a new id", param="id"
        )
