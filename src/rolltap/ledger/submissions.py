"""Submissions: lists of queued tasks, their progress, and what they wait for.

A submission is a list of tasks that share a policy, a group size and a rule. Each task waits in the queue until a node
asks for work and the policy's trainers have room for another group. Then its group is opened
(`rolltap.ledger.task_queue`). A group that replaces a zero-variance one belongs to the same submission.

A large submission comes in parts. Until the last one has come, it is a row of `partial_submissions`, where nothing
looks for work; then it is queued, as if it had come whole at that time.

Work waits for a node, for trainers to consume groups, or for their curriculum. A node is alive if it has claims, or has
asked for work within `NODE_MEMORY` seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from rolltap.contract.admin import LATE, GroupRule, Submission
from rolltap.errors import InvalidRequest, LedgerError, NotFound
from rolltap.ids import new_id
from rolltap.ledger.completion import drop_all, leave_out
from rolltap.ledger.groups import GroupSpec, insert_task, parent_of
from rolltap.ledger.policies import demands_of, first_behind, lock_policies, room
from rolltap.ledger.rows import load_groups, rule_json
from rolltap.ledger.schema import groups, nodes, partial_submissions, rollouts, submissions, submitted, tasks
from rolltap.ledger.task_queue import opens_any
from rolltap.ledger.unit_of_work import BULK_WITHIN_S, LedgerSettings, Tx, UnitOfWork
from rolltap.types import Group, GroupStatus, RolloutStatus, Task
from rolltap.wording import utc_text

MAX_TASKS = 10_000
MANY = 200


@dataclass(frozen=True, slots=True)
class SubmissionSpec:
    """A submission to queue: `n` rollouts of each of `tasks`, with one `rule`. A greater `priority` goes first.

    `policy` is the trained one. `roles` maps each role to its policy if there are several; `also` are the other ones
    that are trained. Of a part, `tasks` are those from index `first` of `total`.
    """

    policy: str
    n: int
    tasks: tuple[Task, ...]
    tags: tuple[str, ...] = ()
    rule: GroupRule = field(default_factory=GroupRule)
    priority: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    first: int = 0
    total: int | None = None

    def __post_init__(self) -> None:
        if not self.tasks or self.of > MAX_TASKS:
            raise InvalidRequest(f"submit 1 to {MAX_TASKS} tasks at once, not {self.of}", param="tasks")
        if (end := self.first + len(self.tasks)) > self.of:
            raise InvalidRequest(f"the part ends with task {end} of {self.of}", param="total")
        seen: set[str] = set()
        for task in self.tasks:
            if task.id in seen:
                raise InvalidRequest(f"two tasks have the id {task.id!r}", param="tasks")
            seen.add(task.id)
            parent_of(task)
        self.group(self.tasks[0])  # checks n and the rule

    def group(self, task: Task) -> GroupSpec:
        return GroupSpec(self.policy, self.n, task, self.tags, self.rule, self.priority, self.roles, self.also)

    @property
    def of(self) -> int:
        """The number of the submission's tasks."""
        return len(self.tasks) if self.total is None else self.total

    def digest(self, task_digests: Sequence[str | None]) -> str:
        """SHA-256 of the content with these tasks, without the priority."""
        policy = dict(self.roles) or self.policy
        content = [policy, self.n, task_digests, self.tags, rule_json(self.rule)]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()


class Submissions:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def submit(self, spec: SubmissionSpec, *, submission_id: str | None = None) -> Submission:
        """Queues the tasks, or of a part, once all have come. The same `submission_id` with the same content again has
        no effect."""
        id = submission_id or new_id()

        def work(tx: Tx) -> Submission:
            lock_policies(tx, spec.policy, spec.also)
            own = [insert_task(tx, task) for task in spec.tasks]
            known = tx.first(sa.select(submissions).where(submissions.c.id == id))
            if known is None:
                digests = _with_part(tx, id, spec, own)
                if None in digests:
                    return _partial(tx, id, spec, sum(digest is not None for digest in digests))
                _insert(tx, id, spec, digests)
                return _load(tx, id, self._uow.settings)
            ordered = sa.select(submitted.c.task_digest).where(submitted.c.submission_id == id)
            digests = [row.task_digest for row in tx.all(ordered.order_by(submitted.c.position))]
            if not digests:
                raise LedgerError(f"submission {id} was pruned; use a new id", param="id")
            digests[spec.first : spec.first + len(own)] = own
            if len(digests) != spec.of or known.digest != spec.digest(digests):
                raise _is_another(id)
            return _load(tx, id, self._uow.settings)

        return await self._uow.transact(work, within_s=BULK_WITHIN_S)

    async def get(self, submission_id: str) -> Submission:
        return await self._uow.query(lambda tx: _load(tx, submission_id, self._uow.settings))

    async def list(self, *, limit: int = 50) -> Sequence[Submission]:
        """The newest submissions first."""
        ids = sa.select(submissions.c.id).order_by(submissions.c.created_at.desc(), submissions.c.id.desc())
        settings = self._uow.settings
        return await self._uow.query(lambda tx: [_load(tx, row.id, settings) for row in tx.all(ids.limit(limit))])

    async def groups(self, submission_id: str, *, after: str = "", limit: int = 100) -> Sequence[Group]:
        """A page of its groups by id, with rollouts and rewards. `after` is the last id of the previous page."""
        ids = sa.select(groups.c.id).where(groups.c.submission_id == submission_id, groups.c.id > after)
        ids = ids.order_by(groups.c.id).limit(limit)
        return await self._uow.query(lambda tx: load_groups(tx, [row.id for row in tx.all(ids)]))

    async def of_group(self, group_id: str) -> str | None:
        """The id of the group's submission, if it has one."""
        statement = sa.select(groups.c.submission_id).where(groups.c.id == group_id)
        return await self._uow.query(lambda tx: tx.scalar(statement))

    async def cancel(self, submission_id: str, reason: str = "cancelled") -> Submission:
        """Cancels the submission: its queued tasks and its open groups. Complete groups stay."""

        def work(tx: Tx) -> Submission:
            locked = sa.select(submissions).where(submissions.c.id == submission_id).with_for_update()
            row = tx.first(locked)
            if row is None:
                raise _unknown(tx, submission_id)
            if row.cancelled_at is None:
                change = sa.update(submissions).where(submissions.c.id == submission_id)
                tx.run(change.values(cancelled_at=tx.now))
                tx.note("submission_cancelled", submission_id, reason=reason)
            mine = groups.c.submission_id == submission_id, groups.c.status == GroupStatus.OPEN
            still_open = sa.select(groups).where(*mine).order_by(groups.c.id).with_for_update(key_share=True)
            for group in tx.all(still_open):
                rows = tx.all(sa.select(rollouts).where(rollouts.c.group_id == group.id))
                leave_out(tx, [each.id for each in rows], rows, reason)
                drop_all(tx, group.id, reason)
            return _load(tx, submission_id, self._uow.settings)

        return await self._uow.transact(work, within_s=BULK_WITHIN_S)


def _with_part(tx: Tx, id: str, spec: SubmissionSpec, own: Sequence[str]) -> list[str | None]:
    """The digests of the submission's tasks that have come, its part `spec` included; None for those to come."""
    nothing = [None] * spec.of
    tx.insert_new(
        partial_submissions, {"id": id, "digest": spec.digest(nothing), "task_digests": nothing, "at": tx.now}
    )
    row = tx.first(sa.select(partial_submissions).where(partial_submissions.c.id == id).with_for_update())
    assert row is not None
    part = slice(spec.first, spec.first + len(own))
    digests: list[str | None] = list(row.task_digests)
    if row.digest != spec.digest(nothing) or any(
        known not in (None, digest) for known, digest in zip(digests[part], own, strict=True)
    ):
        raise _is_another(id)
    digests[part] = own
    mine = partial_submissions.c.id == id
    if None in digests:
        tx.run(sa.update(partial_submissions).where(mine).values(task_digests=digests, at=tx.now))
    else:
        tx.run(sa.delete(partial_submissions).where(mine))
    return digests


def _is_another(id: str) -> LedgerError:
    return LedgerError(f"submission {id} is on record with other tasks or settings; use a new id", param="id")


def _partial(tx: Tx, id: str, spec: SubmissionSpec, count: int) -> Submission:
    return Submission(
        id=id,
        policy=spec.policy,
        roles=spec.roles,
        also=spec.also,
        n=spec.n,
        priority=spec.priority,
        tags=spec.tags,
        created_at=tx.now,
        cancelled=False,
        tasks=count,
        queued=0,
        groups={},
        rollouts={},
        reward_mean=None,
        waits_for=f"the rest of its tasks: {count:,} of {spec.of:,} have come",
        ended=False,
        late=0,
    )


def _insert(tx: Tx, id: str, spec: SubmissionSpec, digests: Sequence[str | None]) -> None:
    values = {
        "id": id,
        "digest": spec.digest(digests),
        "policy": spec.policy,
        "roles": dict(spec.roles) or None,
        "also": list(spec.also) or None,
        "n": spec.n,
        "priority": spec.priority,
        "tags": list(spec.tags),
        "rule": rule_json(spec.rule),
        "created_at": tx.now,
    }
    tx.run(submissions.insert().values(values))
    rows = [{"submission_id": id, "position": at, "task_digest": digest} for at, digest in enumerate(digests)]
    tx.run(submitted.insert(), rows)
    named = sa.select(tasks.c.id).join(submitted, submitted.c.task_digest == tasks.c.digest)
    twice = named.where(submitted.c.submission_id == id).group_by(tasks.c.id).having(sa.func.count() > 1)
    if (name := tx.scalar(twice.limit(1))) is not None:  # in two parts
        raise InvalidRequest(f"two tasks have the id {name!r}", param="tasks")
    if len(rows) >= MANY and tx.connection.dialect.name == "postgresql":
        # Else claims go by plans for the short queue of before, until a vacuum: each would read all tasks.
        tx.connection.exec_driver_sql(f"ANALYZE {submitted.name}")
    tx.note("submitted", id, policy=spec.policy, tasks=len(digests), n=spec.n)


def _load(tx: Tx, id: str, settings: LedgerSettings) -> Submission:
    row = tx.first(sa.select(submissions).where(submissions.c.id == id))
    if row is None:
        raise _unknown(tx, id)
    own = groups.c.submission_id == id
    of_groups = sa.select(groups.c.status, sa.func.count()).where(own).group_by(groups.c.status)
    joined = sa.select(rollouts.c.status, sa.func.count()).join(groups, groups.c.id == rollouts.c.group_id)
    mine = submitted.c.submission_id == id
    count = sa.select(sa.func.count()).select_from(submitted)
    queued = 0 if row.cancelled_at else tx.scalar(count.where(mine, submitted.c.group_id.is_(None)))
    groups_by_status = dict(map(tuple, tx.all(of_groups)))
    return Submission(
        id=row.id,
        policy=row.policy,
        roles=row.roles or {},
        also=tuple(row.also or ()),
        n=row.n,
        priority=row.priority,
        tags=tuple(row.tags),
        created_at=row.created_at,
        cancelled=row.cancelled_at is not None,
        tasks=tx.scalar(count.where(mine)),
        queued=queued,
        groups=groups_by_status,
        rollouts=dict(map(tuple, tx.all(joined.where(own).group_by(rollouts.c.status)))),
        reward_mean=tx.scalar(sa.select(sa.func.avg(groups.c.reward_mean)).where(own)),
        late=tx.scalar(
            sa.select(sa.func.count())
            .select_from(rollouts.join(groups, groups.c.id == rollouts.c.group_id))
            .where(own, rollouts.c.reason.startswith(LATE))
        ),
        waits_for=waits_for(tx, row, queued, settings),
        ended=queued == 0 and not groups_by_status.get(GroupStatus.OPEN),
    )


def _unknown(tx: Tx, id: str) -> NotFound:
    digests = tx.scalar(sa.select(partial_submissions.c.task_digests).where(partial_submissions.c.id == id))
    if digests is None:
        return NotFound(f"no submission {id!r}", param="id")
    count = sum(digest is not None for digest in digests)
    return NotFound(
        f"submission {id!r} is not queued: {count:,} of its {len(digests):,} tasks have come; to submit it again under "
        "its id goes on",
        param="id",
    )


NODE_MEMORY = 60.0
"""Seconds. A waiting node asks again sooner, as the longest wait of a claim is shorter."""


def waits_for(tx: Tx, submission: Any, queued: int, settings: LedgerSettings) -> str:
    """What the unclaimed work of a submission (its row) waits for, as text; "" if all of it runs."""
    free = (
        sa.select(sa.func.count())
        .select_from(rollouts.join(groups, groups.c.id == rollouts.c.group_id))
        .where(groups.c.submission_id == submission.id, groups.c.status == GroupStatus.OPEN)
        .where(rollouts.c.status == RolloutStatus.PENDING, rollouts.c.node_token.is_(None))
    )
    unclaimed = tx.scalar(free)
    if not unclaimed and queued and not opens_any(tx, submission.id, settings.trainer_silence):
        return f"the curriculum of policy {submission.policy}: it names none of the {queued:,} queued tasks"
    names = (submission.policy, *(submission.also or ()))
    full = [name for name in names if room(tx, name, settings.trainer_silence) == 0] if queued else []
    behind = first_behind(tx, names, settings) if submission.also and queued else ""
    if unclaimed or (queued and not full and not behind):
        return _for_a_node(tx, submission.id)
    if full:
        return _for_trainers(tx, full[0], settings)
    return f"the trainer of {behind}, which has not made its step on rollouts that others have" if behind else ""


def _for_a_node(tx: Tx, submission: str) -> str:
    serves = sa.or_(nodes.c.submission_id.is_(None), nodes.c.submission_id == submission)
    holding = sa.exists().where(rollouts.c.node == nodes.c.name, rollouts.c.node_expires_at > tx.now)
    known = sa.select(nodes).where(serves).order_by(nodes.c.name)
    alive = tx.all(known.where(sa.or_(nodes.c.asked_at > tx.now - NODE_MEMORY, holding)))
    if alive:
        return f"a free slot of {_some([row.name for row in alive])}"
    last = tx.first(sa.select(nodes).where(serves).order_by(nodes.c.asked_at.desc()).limit(1))
    last_node = f"; the last one, {last.name}, asked at {_time(last.asked_at)}" if last else ""
    return f"a node: none asks for work (`rolltap node`){last_node}"


def _for_trainers(tx: Tx, policy: str, settings: LedgerSettings) -> str:
    demands = demands_of(tx, policy, settings.trainer_silence)
    who = _some([f"{row.trainer} (last heard of at {_time(row.seen_at)})" for row in demands])
    of_policy = sa.select(groups.c.status, sa.func.count()).where(groups.c.policy == policy)
    counts = dict(map(tuple, tx.all(of_policy.group_by(groups.c.status))))
    there = ", ".join(
        f"{counts.get(status, 0)} {name}"
        for status, name in (
            (GroupStatus.COMPLETE, "ready"),
            (GroupStatus.LEASED, "leased"),
            (GroupStatus.OPEN, "under way"),
        )
    )
    return f"room at the trainers of {policy}: {who}; groups: {there}"


def _some(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _time(at: float) -> str:
    return utc_text(at, "%Y-%m-%d %H:%M:%SZ")
