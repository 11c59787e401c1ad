"""The queue of submitted tasks: which one's group is opened next.

The greatest priority goes first, then the submission that is the oldest, then its own order. Policies' controls
(`rolltap.contract.control`) change priorities, the sizes of groups, and by a curriculum the order of a policy's tasks
among those of the same priority. Submissions for evaluation follow no control.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from rolltap.contract.admin import GroupRule
from rolltap.contract.control import OTHERS, RolloutControl
from rolltap.errors import InvalidRequest
from rolltap.ids import new_id
from rolltap.ledger.groups import GroupSpec, insert_group
from rolltap.ledger.policies import controls_in_force, first_behind, lock_policies, room
from rolltap.ledger.rows import rule_of, task_of
from rolltap.ledger.schema import demands, submissions, submitted, tasks
from rolltap.ledger.unit_of_work import LedgerSettings, Tx
from rolltap.types import EVALUATION, PURPOSE_TAG

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
