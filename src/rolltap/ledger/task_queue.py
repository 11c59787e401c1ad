"""The queue of submitted tasks: which one's group is opened next.

The greatest priority goes first, then the submission that is the oldest, then its own order. Policies' controls
(`rolltap.contract.control`) change priorities, the sizes of groups, and by a curriculum the order of a policy's tasks
among those of the same priority. Submissions for evaluation follow no control.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.contract.admin import GroupRule
from rolltap.contract.control import OTHERS, RolloutControl
from rolltap.errors import InvalidRequest
from rolltap.ids import new_id
from rolltap.ledger.controls import controls_in_force
from rolltap.ledger.groups import GroupSpec, insert_group
from rolltap.ledger.policies import locked_policy, room
from rolltap.ledger.rows import rule_of, task_of
from rolltap.ledger.schema import policies, submissions, submitted, tasks
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import EVALUATION, PURPOSE_TAG

MEASURING = f"{PURPOSE_TAG}={EVALUATION}"
"""Tag of what is for evaluation."""

JOINED = submitted.join(submissions, submissions.c.id == submitted.c.submission_id).join(
    tasks, tasks.c.digest == submitted.c.task_digest
)
ORDER = (submissions.c.created_at, submitted.c.submission_id, submitted.c.position)
LARGEST = 2**31 - 1
"""Of a group's priority, up or down."""


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A row of the queue, and what its policy's control says of the group that is opened for it."""

    row: Any
    control: RolloutControl

    @property
    def priority(self) -> int:
        """The group's priority: its submission's, as the control changes it."""
        return max(-LARGEST, min(LARGEST, self.row.priority + (self.control.priority or 0)))


def has_queued(tx: Tx, submission: str | None) -> bool:
    """Whether any task is queued, even if a curriculum or the trainers' room holds it back."""
    return tx.first(_waiting(submission).limit(1)) is not None


def opens_any(tx: Tx, submission: str) -> bool:
    """Whether the curriculum of the submission's policy opens any of its queued tasks."""
    return tx.first(_allowed(tx, _waiting(submission), controls_in_force(tx)).limit(1)) is not None


def next_queued(tx: Tx, submission: str | None, silence: float) -> QueuedTask | None:
    """The task to open next, its row locked, of a policy that has room for a group; None if there is none.

    Where a curriculum is set, each call draws anew.
    """
    controls = controls_in_force(tx)
    full = [row.name for row in tx.all(sa.select(policies.c.name)) if room(tx, row.name, silence) == 0]
    waiting = _waiting(submission).where(submissions.c.policy.not_in(full))
    head = _locked(tx, _allowed(tx, waiting, controls).order_by(_priority(tx, controls).desc(), *ORDER))
    if head is None:
        return None
    control = RolloutControl() if MEASURING in head.tags else controls.get(head.policy, RolloutControl())
    if control.curriculum:
        place = _place(tx, _drawn(control.curriculum))
        peers = waiting.where(
            submissions.c.policy == head.policy,
            submissions.c.priority == head.priority,
            sa.not_(_has(tx, submissions.c.tags, MEASURING)),
            place.is_not(None),
        )
        head = _locked(tx, peers.order_by(place, *ORDER))
    return QueuedTask(head, control)


def open_queued(tx: Tx, queued: QueuedTask, silence: float) -> bool:
    """Opens the group of a queued task; False if another transaction has just taken the room or cancelled the task."""
    head = queued.row
    locked_policy(tx, head.policy)
    if room(tx, head.policy, silence) == 0:
        return False
    own = sa.select(submissions).where(submissions.c.id == head.submission_id)
    submission = tx.first(own.with_for_update(read=True))
    task = tx.first(sa.select(tasks).where(tasks.c.digest == head.task_digest))
    assert submission is not None
    if submission.cancelled_at is not None:
        return False
    rule, roles = rule_of(submission), submission.roles or {}
    n = _size(submission.n, queued.control.n, rule, roles)
    spec = GroupSpec(submission.policy, n, task_of(task), tuple(submission.tags), rule, queued.priority, roles)
    group_id = new_id()
    insert_group(tx, group_id, spec, submission_id=submission.id)
    its_row = sa.and_(submitted.c.submission_id == head.submission_id, submitted.c.position == head.position)
    tx.run(sa.update(submitted).where(its_row).values(group_id=group_id))
    return True


def _waiting(submission: str | None) -> sa.Select[Any]:
    """The queued tasks, of one `submission` if it is given."""
    columns = (submissions.c.priority, submissions.c.policy, submissions.c.tags)
    waiting = sa.select(submitted, *columns).select_from(JOINED)
    waiting = waiting.where(submitted.c.group_id.is_(None), submissions.c.cancelled_at.is_(None))
    return waiting if submission is None else waiting.where(submissions.c.id == submission)


def _locked(tx: Tx, ordered: sa.Select[Any]) -> Any:
    """The first row that no other transaction has locked."""
    return tx.first(ordered.limit(1).with_for_update(skip_locked=True, of=submitted))


def _allowed(tx: Tx, waiting: sa.Select[Any], controls: Mapping[str, RolloutControl]) -> sa.Select[Any]:
    """Without the tasks that a curriculum holds back."""
    curricula = {policy: control.curriculum for policy, control in controls.items() if control.curriculum}
    if not curricula:
        return waiting
    allowed = [submissions.c.policy.not_in(curricula), _has(tx, submissions.c.tags, MEASURING)]
    for policy, weights in curricula.items():
        allowed.append(sa.and_(submissions.c.policy == policy, _place(tx, list(weights)).is_not(None)))
    return waiting.where(sa.or_(*allowed))


def _priority(tx: Tx, controls: Mapping[str, RolloutControl]) -> sa.ColumnElement[int]:
    """A queued task's priority, as its policy's control changes it."""
    own = sa.cast(submissions.c.priority, sa.BigInteger)  # the sum may not fit into the column
    changes = {policy: control.priority for policy, control in controls.items() if control.priority}
    if not changes:
        return own
    change = sa.case(changes, value=submissions.c.policy, else_=0)
    return own + sa.case((_has(tx, submissions.c.tags, MEASURING), 0), else_=change)


def _drawn(weights: Mapping[str, float]) -> Sequence[str]:
    """The names in the order in which they are drawn, without replacement, each by its weight among the rest."""
    return sorted(weights, key=lambda name: -math.log(1 - random.random()) / weights[name])


def _place(tx: Tx, names: Sequence[str]) -> sa.ColumnElement[int | None]:
    """The place in `names` of a queued task's id, else of its first named tag, else of `*`; NULL if it has none."""
    places = {name: place for place, name in enumerate(names)}
    others = places.pop(OTHERS, None)
    if not places:
        return sa.literal(others, sa.Integer)
    tag = _each(tx, tasks.c.tags)
    of_tags = sa.select(sa.func.min(sa.case(places, value=tag.c.value))).select_from(tag).correlate(tasks)
    return sa.func.coalesce(sa.case(places, value=tasks.c.id), of_tags.scalar_subquery(), others)


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
