"""Submissions: lists of queued tasks, their progress, and what they wait for; and which one's group is opened next.

A submission is a list of tasks that share a policy, a group size and a rule. Each task waits in the queue until a node
asks for work and the policy's trainers have room for another group. Then its group is opened. A group that replaces a
zero-variance one belongs to the same submission.

The greatest priority goes first, then the submission that is the oldest, then its own order. Policies' controls
(`rolltap.contract.control`) change priorities, the sizes of groups, and by a curriculum the order of a policy's tasks
among those of the same priority. Submissions for evaluation follow no control.

A large submission comes in parts. Until the last one has come, it is a row of `partial_submissions`, where nothing
looks for work; then it is queued, as if it had come whole at that time.

Work waits for a node, for trainers to consume groups, or for their curriculum. A node is alive if it has claims, or has
asked for work within `NODE_MEMORY` seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa

from rolltap.contract.admin import LATE, GroupRule, Submission
from rolltap.contract.control import OTHERS, RolloutControl
from rolltap.errors import InvalidRequest, LedgerError, NotFound
from rolltap.ids import new_id
from rolltap.ledger.groups import GroupSpec, drop_all, insert_group, insert_task, leave_out, parent_of
from rolltap.ledger.policies import controls_in_force, demands_of, first_behind, lock_policies, room
from rolltap.ledger.rows import load_groups, rule_json, rule_of, task_of
from rolltap.ledger.schema import demands, groups, nodes, partial_submissions, rollouts, submissions, submitted, tasks
from rolltap.ledger.unit_of_work import BULK_WITHIN_S, LedgerSettings, Tx, UnitOfWork
from rolltap.types import EVALUATION, PURPOSE_TAG, Group, GroupStatus, RolloutStatus, Task
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


MEASURING = f"{PURPOSE_TAG}={EVALUATION}"
"""Tag of what is for evaluation."""

QUEUE = submitted.join(submissions, submissions.c.id == submitted.c.submission_id)
HEADS = 64
"""Most submissions that are looked at for one task: those before it are locked whole, by other claims."""
LARGEST = 2**31 - 1
"""Of a group's priority, up or down."""
NO_NAME = -1
"""Place of a task that no curriculum concerns."""


class _Key(NamedTuple):
    """What the tasks have in common among which the longest queued goes first."""

    priority: int  # as the control changes it
    policy: str
    place: int  # among the names of the policy's curriculum
    also: str | None  # the other policies that are trained, as JSON

    @property
    def policies(self) -> list[str]:
        """The policies that are trained."""
        return [self.policy, *(json.loads(self.also) if self.also else ())]


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A row of the queue, and what its policy's control says of the group that is opened for it."""

    row: Any
    control: RolloutControl

    @property
    def priority(self) -> int:
        """The group's priority: its submission's, as the control changes it."""
        return max(-LARGEST, min(LARGEST, self.row.priority + (self.control.priority or 0)))


class TaskQueue:
    """The queue as one claim of a node sees it, within the claim's transaction: `next` is the task to open next.

    With a curriculum every queued task must be compared with its names. So the queue is then read once for all groups
    of the claim, `most` tasks of each name, and a second time only if other transactions took all of these.
    """

    def __init__(self, tx: Tx, submission: str | None, settings: LedgerSettings, most: int) -> None:
        self._tx = tx
        self._submission = submission
        self._settings = settings
        self._most = most
        self._controls = controls_in_force(tx, settings.trainer_silence)
        self._by_key: dict[_Key, deque[tuple[int, Any]]] | None = None
        self._missed_some = False  # tasks that other transactions took since the queue was read
        self._reads_left = 2

    def next(self) -> QueuedTask | None:
        """The task to open next, its row locked, of policies that have room for a group; None if there is none.

        Where a curriculum is set, each call draws anew.
        """
        names = [row.policy for row in self._tx.all(sa.select(demands.c.policy).distinct())]  # others have room
        full = [name for name in names if room(self._tx, name, self._settings.trainer_silence) == 0]
        behind = [name for name in names if first_behind(self._tx, [name], self._settings)]
        draws = any(control.curriculum for control in self._controls.values())
        row = self._drawn(full, behind) if draws else self._head(full, behind)
        if row is None:
            return None
        measures = MEASURING in row.tags
        return QueuedTask(row, RolloutControl() if measures else self._controls.get(row.policy, RolloutControl()))

    def _head(self, full: Collection[str], behind: Collection[str]) -> Any:
        """The locked row of the first task: the first one of the first submission that has any. `full` policies have no
        room, and the barrier of those with several waits for those that are `behind`.

        Each step reads one row of an index. Sorting the tasks themselves would take time by the length of the queue.
        """
        queued = sa.exists().where(submitted.c.submission_id == submissions.c.id, submitted.c.group_id.is_(None))
        heads = sa.select(submissions.c.id).where(
            submissions.c.cancelled_at.is_(None), submissions.c.policy.not_in(full), queued
        )
        for name in {*full, *behind}:
            heads = heads.where(sa.or_(submissions.c.also.is_(None), sa.not_(trains(self._tx, name))))
        if self._submission is not None:
            heads = heads.where(submissions.c.id == self._submission)
        heads = heads.order_by(
            _priority(self._tx, self._controls).desc(), submissions.c.created_at, submissions.c.id
        ).limit(HEADS)
        for head in self._tx.all(heads):
            own = _waiting(head.id).order_by(submitted.c.position)
            if (row := _locked(self._tx, own)) is not None:
                return row
        return None

    def _drawn(self, full: Collection[str], behind: Collection[str]) -> Any:
        """The locked row of the first task, or of one that its policy's curriculum draws in its place."""
        if self._by_key is None:
            self._by_key = _by_name(self._tx, self._submission, self._controls, self._most)
            self._reads_left -= 1

        def may_open(key: _Key) -> bool:
            return not any(name in full or (key.also and name in behind) for name in key.policies)

        while heads := {key: rows[0][0] for key, rows in self._by_key.items() if rows and may_open(key)}:
            first = min(heads, key=lambda key: heads[key])
            for key in self._order(first, heads):
                if (row := self._first_free(self._by_key[key])) is not None:
                    return row
        if not self._missed_some or not self._reads_left:
            return None
        self._missed_some, self._by_key = False, None
        return self._drawn(full, behind)

    def _order(self, first: _Key, heads: Collection[_Key]) -> Sequence[_Key]:
        """The names that stand for `first`, in the order in which they are drawn: of its policy and its priority."""
        if first.place == NO_NAME:
            return [first]
        weights = list(self._controls[first.policy].curriculum.values())
        peers = [key for key in heads if key[:2] == first[:2] and key.place != NO_NAME]
        # In the order in which they are drawn, without replacement, each by its weight among the rest.
        return sorted(peers, key=lambda key: -math.log(1 - random.random()) / weights[key.place])

    def _first_free(self, rows: deque[tuple[int, Any]]) -> Any:
        """The first of the rows that is still queued and not locked, locked; those before it are dropped."""
        while rows:
            _, head = rows.popleft()
            own = sa.and_(submitted.c.submission_id == head.submission_id, submitted.c.position == head.position)
            if (row := _locked(self._tx, _waiting(self._submission).where(own))) is not None:
                return row
            self._missed_some = True
        return None


def trains(tx: Tx, policy: str) -> sa.ColumnElement[bool]:
    """The condition for submissions that train the policy."""
    return sa.or_(submissions.c.policy == policy, _has(tx, submissions.c.also, policy))


def has_queued(tx: Tx, submission: str | None) -> bool:
    """Whether any task is queued, even if a curriculum or the trainers' room holds it back."""
    return tx.first(_waiting(submission).limit(1)) is not None


def opens_any(tx: Tx, submission: str | None, silence: float) -> bool:
    """Whether any task is queued that no curriculum holds back, even if the trainers' room does."""
    controls = controls_in_force(tx, silence)
    waiting, place = _with_place(tx, _waiting(submission), controls)
    return tx.first(waiting.where(place.is_not(None)).limit(1)) is not None


def open_queued(tx: Tx, queued: QueuedTask, settings: LedgerSettings) -> int:
    """Opens the group of a queued task, and those that share its rollouts; returns the number of these, 0 if another
    transaction has just taken the room or cancelled the task."""
    head, also = queued.row, tuple(queued.row.also or ())
    lock_policies(tx, head.policy, also)
    if any(room(tx, name, settings.trainer_silence) == 0 for name in (head.policy, *also)):
        return 0
    own = sa.select(submissions).where(submissions.c.id == head.submission_id)
    submission = tx.first(own.with_for_update(read=True))
    task = tx.first(sa.select(tasks).where(tasks.c.digest == head.task_digest))
    assert submission is not None
    if submission.cancelled_at is not None:
        return 0
    rule, roles = rule_of(submission), submission.roles or {}
    n = _size(submission.n, queued.control.n, rule, roles)
    spec = GroupSpec(submission.policy, n, task_of(task), tuple(submission.tags), rule, queued.priority, roles, also)
    group_id = new_id()
    insert_group(tx, group_id, spec, head.task_digest, submission_id=submission.id)
    its_row = sa.and_(submitted.c.submission_id == head.submission_id, submitted.c.position == head.position)
    tx.run(sa.update(submitted).where(its_row).values(group_id=group_id))
    return n


def _waiting(submission: str | None) -> sa.Select[Any]:
    """The queued tasks, of one `submission` if it is given."""
    columns = (submissions.c.priority, submissions.c.policy, submissions.c.tags, submissions.c.also)
    waiting = sa.select(submitted, *columns).select_from(QUEUE)
    waiting = waiting.where(submitted.c.group_id.is_(None), submissions.c.cancelled_at.is_(None))
    return waiting if submission is None else waiting.where(submissions.c.id == submission)


def _locked(tx: Tx, ordered: sa.Select[Any]) -> Any:
    """The first row that no other transaction has locked."""
    return tx.first(ordered.limit(1).with_for_update(skip_locked=True, of=submitted))


def _with_place(
    tx: Tx, waiting: sa.Select[Any], controls: Mapping[str, RolloutControl]
) -> tuple[sa.Select[Any], sa.ColumnElement[int | None]]:
    """Queued tasks joined with what curricula need, and each one's place among its curriculum's names.

    The place is NULL if the curriculum holds the task back, and `NO_NAME` if no curriculum concerns it.
    """
    curricula = {policy: list(control.curriculum) for policy, control in controls.items() if control.curriculum}
    if not curricula:
        return waiting, sa.literal(NO_NAME)
    untouched = sa.or_(submissions.c.policy.not_in(curricula), _has(tx, submissions.c.tags, MEASURING))
    places = [(submissions.c.policy == policy, _place(tx, names)) for policy, names in curricula.items()]
    return waiting.join(tasks, tasks.c.digest == submitted.c.task_digest), sa.case((untouched, NO_NAME), *places)


def _by_name(
    tx: Tx, submission: str | None, controls: Mapping[str, RolloutControl], most: int
) -> dict[_Key, deque[tuple[int, Any]]]:
    """The first `most` queued tasks of each name, policy and priority, numbered in the queue's order."""
    waiting, place = _with_place(tx, _waiting(submission), controls)
    priority = _priority(tx, controls)
    keyed = waiting.with_only_columns(
        submitted.c.submission_id, submitted.c.position, submissions.c.created_at, submissions.c.policy,
        priority.label("effective"), place.label("place"), sa.cast(submissions.c.also, sa.Text).label("also"),
    ).subquery()  # fmt: skip
    own = (keyed.c.created_at, keyed.c.submission_id, keyed.c.position)
    alike = (keyed.c.effective, keyed.c.policy, keyed.c.place, keyed.c.also)
    nth = sa.func.row_number().over(partition_by=alike, order_by=own)
    ranked = sa.select(keyed, nth.label("nth")).where(keyed.c.place.is_not(None)).subquery()
    first = sa.select(ranked).where(ranked.c.nth <= most)
    first = first.order_by(ranked.c.effective.desc(), ranked.c.created_at, ranked.c.submission_id, ranked.c.position)
    by_key: dict[_Key, deque[tuple[int, Any]]] = defaultdict(deque)
    for number, row in enumerate(tx.all(first)):
        by_key[_Key(row.effective, row.policy, row.place, row.also)].append((number, row))
    return by_key


def _priority(tx: Tx, controls: Mapping[str, RolloutControl]) -> sa.ColumnElement[int]:
    """A queued task's priority, as its policy's control changes it."""
    changes = {policy: control.priority for policy, control in controls.items() if control.priority}
    if not changes:
        return submissions.c.priority
    own = sa.cast(submissions.c.priority, sa.BigInteger)  # the sum may not fit into the column
    change = sa.case(changes, value=submissions.c.policy, else_=0)
    return own + sa.case((_has(tx, submissions.c.tags, MEASURING), 0), else_=change)


def _place(tx: Tx, names: Sequence[str]) -> sa.ColumnElement[int | None]:
    """The place in `names` of a queued task's id, else of its first named tag, else of `*`; NULL if it has none."""
    places = {name: place for place, name in enumerate(names)}
    others = places.pop(OTHERS, None)
    if not places:
        return sa.literal(others, sa.Integer)
    tag = _each(tx, tasks.c.tags)
    of_tags = sa.select(sa.func.min(sa.case(places, value=tag.c.value))).select_from(tag).correlate(tasks)
    of_tags = of_tags.where(tag.c.value.in_(places))  # databases look a value up in a list faster than in a CASE
    of_id = sa.case((tasks.c.id.in_(places), sa.case(places, value=tasks.c.id)))
    return sa.func.coalesce(of_id, of_tags.scalar_subquery(), others)


def _has(tx: Tx, column: sa.Column[Any], value: str) -> sa.ColumnElement[bool]:
    """Whether a column with a JSON array of strings has `value`."""
    item = _each(tx, column)
    return sa.exists(sa.select(sa.literal(1)).select_from(item).where(item.c.value == value).correlate(column.table))


def _each(tx: Tx, column: sa.Column[Any]) -> Any:
    """The strings of a JSON array, as rows with the column `value`."""
    unpack = sa.func.json_each if tx.connection.dialect.name == "sqlite" else sa.func.json_array_elements_text
    return unpack(column).table_valued(sa.column("value", sa.String))


def _size(own: int, wanted: int | None, rule: GroupRule, roles: Mapping[str, str]) -> int:
    """`wanted`, or `own` if nothing else is wanted or the group's rule could not be met by so many."""
    if wanted is None:
        return own
    try:
        rule.check(wanted, roles)
    except InvalidRequest:
        return own
    return wanted
