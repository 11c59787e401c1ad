"""Groups: opening (if there is room), cancelling and listing them, and those that trainers refused too often; and when
a group is complete: the decision, a pure function of its rollouts, and its effects.

A rollout is *settled* if it is terminal and, if it is scored, has the rewards that the rule requires. It is *usable* if
it is settled and not unscorable. A masked rollout does not wait for a reward; without a reward it is not in the
baseline either.

`settle` applies the decision when a rollout ends, a reward arrives, or the deadline passes, in a transaction that holds
the group's lock. Only this module takes a group out of the state `open`.

Where several policies are trained in the same rollouts, each has a group, and those of the others share the rollouts of
the first one's. The rule decides on the rollouts once, and all of these groups are complete or dropped together. What
follows is each one's own: its versions, its rewards and whether they differ, and a rollout in which its policy sampled
nothing counts as unscorable in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
import sqlalchemy as sa

from rolltap.contract.admin import EACH_CALL, FORK, WILDCARDS, Fork, GroupRule
from rolltap.contract.trainer import DeadLetter, all_equal
from rolltap.decoding import convert
from rolltap.errors import InvalidRequest, LedgerError, RateLimited
from rolltap.ids import new_id
from rolltap.ledger.policies import first_behind, lock_policies, room
from rolltap.ledger.rows import (
    group_of,
    load_group,
    load_groups,
    locked_group,
    no_group,
    rollout_rows,
    rule_json,
    rule_of,
    task_digest,
)
from rolltap.ledger.schema import OWNER, groups, pruned_groups, rollout_policies, rollouts, tasks
from rolltap.ledger.unit_of_work import LedgerSettings, Tx, UnitOfWork
from rolltap.types import (
    EVALUATION,
    NO_VERSION,
    PURPOSE_TAG,
    Group,
    GroupStatus,
    Rollout,
    RolloutParent,
    RolloutStatus,
    Scoring,
    Task,
    reward_scopes,
)

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


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout's input to the rule. `scopes`: scopes of its rewards; `reward`: its reward in the group;
    `versions`: the oldest and newest of its trained tokens, None without any."""

    rollout_id: str
    status: RolloutStatus
    scoring: Scoring
    scopes: Set[str] = frozenset()
    reward: float | None = None
    trained_calls: tuple[str, ...] = ()
    versions: tuple[int, int] | None = None

    def settled(self, scopes: Sequence[str]) -> bool:
        if not self.status.terminal:
            return False
        return self.scoring is not Scoring.SCORED or all(self._has(scope) for scope in scopes)

    def _has(self, scope: str) -> bool:
        if scope == EACH_CALL:
            return all(f"call:{call}" in self.scopes for call in self.trained_calls)
        if scope in WILDCARDS:
            return any(own.startswith(scope[:-1]) for own in self.scopes)
        return scope in self.scopes


@dataclass(frozen=True, slots=True)
class Wait:
    """The group stays open."""


@dataclass(frozen=True, slots=True)
class Refill:
    """The group needs `count` more rollouts."""

    count: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The group is ready. The rollouts `left_out` become unscorable, and are cancelled if they are not terminal."""

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """The group can never be ready."""

    reason: str
    left_out: tuple[str, ...] = ()


Decision = Wait | Refill | Complete | Drop


def decide(rule: GroupRule, members: Sequence[Member], *, n: int, late: bool) -> Decision:
    """The decision for an open group that began with `n` rollouts. `late`: its deadline has passed."""
    settled = [member for member in members if member.settled(rule.scopes)]
    usable = [member for member in settled if member.scoring is not Scoring.UNSCORABLE]
    waiting = tuple(member.rollout_id for member in members if not member.settled(rule.scopes))
    if rule.usable is not None and len(usable) >= rule.usable:
        return Complete(left_out=waiting)
    if late and waiting:
        if rule.late == "partial" and len(usable) >= rule.min_usable:
            return Complete(left_out=waiting)
        return Drop(f"deadline: {len(usable)} of {len(members)} rollouts were usable", left_out=waiting)
    if rule.usable is not None and not late:
        missing = min(rule.usable - len(usable) - len(waiting), n + rule.spares - len(members))
        if missing > 0:
            return Refill(missing)
    if waiting:
        return Wait()
    if len(usable) >= rule.min_usable:
        return Complete()
    return Drop(f"{len(usable)} of {len(members)} rollouts were usable; {rule.min_usable} are needed")


def usable_rewards(members: Sequence[Member], left_out: Sequence[str]) -> list[float]:
    """The rewards of the usable rollouts."""
    return [
        member.reward
        for member in members
        if member.scoring is not Scoring.UNSCORABLE and member.rollout_id not in left_out and member.reward is not None
    ]


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether there are at least two rewards and all are equal, so that the group has no gradient."""
    return len(rewards) > 1 and all_equal(rewards)


FREE = {"node": None, "node_token": None, "node_expires_at": None, "node_key": None}
"""No node claims the rollout."""


def pending_again(row: Any, *, failed: bool, reason: str | None = None) -> dict[str, Any]:
    """The columns of a rollout that waits for a new attempt. `failed` counts an infrastructure failure.

    The new attempt has its number at once but no session yet, so everything from the previous attempt is refused.
    """
    attempt = row.attempt + 1 if failed or row.session_id else row.attempt
    values = {**FREE, "status": RolloutStatus.PENDING, "attempt": attempt, "session_id": None}
    return {**values, "infra_failures": row.infra_failures + failed, "reason": row.reason if reason is None else reason}


def settle(tx: Tx, group: Any, settings: LedgerSettings) -> None:
    """Applies the rule of a group, which has rollouts of its own, to their current state."""
    if group.status != GroupStatus.OPEN:
        return
    rows_and_rollouts = rollout_rows(tx, [group.id])[group.id]
    trained = [group.policy, *(each.policy for each in _sharing(tx, group.id))] if group.roles else [group.policy]
    members = [
        _with_rollout_scope(member_of(row, rollout), group.roles or {}, trained) for row, rollout in rows_and_rollouts
    ]
    late = group.deadline_at is not None and tx.now >= group.deadline_at
    match decide(rule_of(group), members, n=group.n, late=late):
        case Refill(count):
            parent = rows_and_rollouts[0][1].parent
            insert_rollouts(tx, group.id, range(len(members), len(members) + count), parent)
            tx.note("group_refilled", group.id, rollouts=count)
        case Drop(reason, left_out):
            leave_out(tx, left_out, [row for row, _ in rows_and_rollouts], reason)
            drop_all(tx, group.id, reason)
        case Complete(left_out):
            leave_out(tx, left_out, [row for row, _ in rows_and_rollouts], "the group is complete without it")
            _complete(tx, group, rows_and_rollouts, left_out, settings)


def _complete(
    tx: Tx, group: Any, members: Sequence[tuple[Any, Rollout]], left_out: Sequence[str], settings: LedgerSettings
) -> None:
    """Completes the group and those that share its rollouts. `members` are the rows and rollouts."""
    sharing = _sharing(tx, group.id)
    trains: dict[str, str] = {}
    sampled: dict[tuple[str, str], Any] = {}  # by rollout and policy
    if sharing:
        trains = {each.policy: each.id for each in (group, *sharing)}
        of_members = rollout_policies.c.rollout_id.in_([row.id for row, _ in members])
        sampled = {(row.rollout_id, row.policy): row for row in tx.all(sa.select(rollout_policies).where(of_members))}
    dropped = []
    for each in (group, *sharing):
        own = group_of(each, (), trains)
        played = [_member_in(own, *member, sampled.get((member[0].id, each.policy))) for member in members]
        dropped.append(_complete_one(tx, each, played, left_out))
    rule = rule_of(group)
    if rule.zero_variance == "replace" and group.generation < settings.max_generations and all(dropped):
        _replace(tx, group, [each.policy for each in sharing], members[0][0].parent)


def _complete_one(tx: Tx, group: Any, members: Sequence[Member], left_out: Sequence[str]) -> bool:
    """Completes one group; True if it is dropped because its rewards are all equal."""
    trained = [
        member.versions
        for member in members
        if member.rollout_id not in left_out and member.scoring is Scoring.SCORED and member.versions
    ]
    rewards = usable_rewards(members, left_out)
    is_even, mean = zero_variance(rewards), sum(rewards) / len(rewards) if rewards else None
    values = {
        "status": GroupStatus.COMPLETE,
        "completed_at": tx.now,
        "oldest_version": min((oldest for oldest, _ in trained), default=NO_VERSION),
        "newest_version": max((newest for _, newest in trained), default=NO_VERSION),
        "zero_variance": is_even,
        "reward_mean": mean,
    }
    tx.run(sa.update(groups).where(groups.c.id == group.id).values(values))
    if f"{PURPOSE_TAG}={EVALUATION}" in group.tags:
        drop(tx, group.id, "evaluation")
        return False
    if is_even and rule_of(group).zero_variance != "keep":
        drop(tx, group.id, "zero variance")
        return True
    tx.note("group_complete", group.id, policy=group.policy, task_id=group.task_id, reward_mean=mean)
    tx.wake_trainers()
    return False


def _with_rollout_scope(member: Member, roles: Mapping[str, str], trained: Sequence[str]) -> Member:
    """The member, as rewarded as by a reward of the rollout if each trained policy has a reward of its roles."""
    if any(member.scopes.isdisjoint(scopes) for scopes in reward_scopes(roles, trained)):
        return member
    return replace(member, scopes=member.scopes | {"rollout"})


def _sharing(tx: Tx, group_id: str) -> Sequence[Any]:
    """The rows of the groups that share the rollouts of a group."""
    return tx.all(sa.select(groups).where(groups.c.shares == group_id).order_by(groups.c.id))


def _member_in(group: Group, row: Any, rollout: Rollout, sampled: Any) -> Member:
    """The rollout as it counts in a group. `sampled`: the row of what the group's policy sampled, if there is one."""
    own = row if sampled is None else sampled
    trained = own.oldest_version not in (None, NO_VERSION)
    versions = (own.oldest_version, own.newest_version) if trained else None
    member = replace(member_of(row, rollout), reward=group.reward_of(rollout), versions=versions)
    return member if sampled is None or sampled.sampled else replace(member, scoring=Scoring.UNSCORABLE)


def insert_sharing(tx: Tx, owner: Mapping[str, Any], policies: Sequence[str]) -> None:
    """Inserts a group for each of `policies`, which are trained in the rollouts of the group with the row `owner`.

    A claim, a deadline and a submission are the owner's: they are of rollouts.
    """
    for policy in policies:
        own = {"id": new_id(), "policy": policy, "shares": owner["id"], "submission_id": None, "deadline_at": None}
        tx.run(groups.insert().values({**owner, **own}))
        tx.note("group_opened", own["id"], policy=policy, task_id=owner["task_id"], n=owner["n"], shares=owner["id"])


def _replace(tx: Tx, group: Any, also: Sequence[str], parent: Mapping[str, Any] | None) -> None:
    """Opens a new group of the same task, whose rollouts have the same parent, to replace a dropped one, and those of
    the policies that are `also` trained."""
    values = {
        **group._mapping,
        "id": new_id(),
        "created_at": tx.now,
        "deadline_at": None if group.deadline_at is None else tx.now + group.deadline_at - group.created_at,
        "replaces": group.id,
        "generation": group.generation + 1,
    }
    tx.run(groups.insert().values(values))
    insert_sharing(tx, values, also)
    insert_rollouts(tx, values["id"], range(group.n), None if parent is None else RolloutParent(**parent))
    tx.note("group_opened", values["id"], policy=group.policy, task_id=group.task_id, replaces=group.id)


def drop(tx: Tx, group_id: str, reason: str) -> None:
    """Drops a group: it will not be trained."""
    statement = sa.update(groups).where(groups.c.id == group_id)
    tx.run(statement.values(status=GroupStatus.DROPPED, reason=reason))
    tx.note("group_dropped", group_id, reason=reason)


def drop_all(tx: Tx, group_id: str, reason: str) -> None:
    """Drops an open group and the groups that share its rollouts."""
    for each in (group_id, *(row.id for row in _sharing(tx, group_id))):
        drop(tx, each, reason)


def leave_out(tx: Tx, rollout_ids: Sequence[str], rows: Sequence[Any], reason: str) -> None:
    """Makes rollouts unscorable. Cancels those that are not terminal, and closes their sessions."""
    for row in rows:
        if row.id not in rollout_ids:
            continue
        values: dict[str, Any] = {"scoring": Scoring.UNSCORABLE, "reason": row.reason or reason}
        if not RolloutStatus(row.status).terminal:
            values |= {"status": RolloutStatus.CANCELLED, "reason": reason, "finished_at": tx.now}
            values |= FREE
            tx.end_session(row.session_id)
            tx.note("rollout_finished", row.id, group_id=row.group_id, status=RolloutStatus.CANCELLED, reason=reason)
        tx.run(sa.update(rollouts).where(rollouts.c.id == row.id).values(values))


def insert_rollouts(tx: Tx, group_id: str, indices: Sequence[int], parent: RolloutParent | None = None) -> None:
    """Inserts pending rollouts of a group, forked from `parent`."""
    rows = [
        {
            "id": new_id(),
            "group_id": group_id,
            "position": index,
            "status": RolloutStatus.PENDING,
            "attempt": 0,
            "scoring": Scoring.SCORED,
            "reason": "",
            "trained_calls": [],
            "infra_failures": 0,
            "parent": None if parent is None else asdict(parent),
        }
        for index in indices
    ]
    tx.run(rollouts.insert(), rows)


def member_of(row: Any, rollout: Rollout) -> Member:
    return Member(
        rollout_id=rollout.id,
        status=rollout.status,
        scoring=rollout.scoring,
        scopes=frozenset(reward.scope for reward in rollout.rewards),
        reward=rollout.total_reward,
        trained_calls=tuple(row.trained_calls),
    )
