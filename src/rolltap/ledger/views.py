"""Read-only views of the ledger, for viewers, datasets and `rolltap log prune`.

Functions of a connection: rollouts with their group and task, groups, policies, curves of a run, the state of a run,
and which sessions are still needed. They find nothing if the ledger has no tables yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.calllog.codec import unpack_bytes
from rolltap.calllog.database import Database
from rolltap.calllog.prune import GroupUse
from rolltap.errors import NotFound
from rolltap.ledger.counts import counted
from rolltap.ledger.rows import load_groups, load_tasks, no_group
from rolltap.ledger.schema import (
    OWNER,
    attempts,
    evaluations,
    events,
    groups,
    lease_groups,
    leases,
    policies,
    rewards,
    rollout_policies,
    rollouts,
    submissions,
    submitted,
    tampering,
    tasks,
    trainers,
)
from rolltap.ledger.submissions import trains
from rolltap.ledger.unit_of_work import Tx
from rolltap.tampering import TamperingAct, TamperingKind
from rolltap.types import EVALUATION, NO_VERSION, PURPOSE_TAG, Group, GroupStatus, Rollout, Scoring, Task

EVENT_MARGIN_S = 30.0

LAST_ACTS = 1000


@dataclass(frozen=True, slots=True)
class SessionOrigin:
    """A session's rollout with its group, task and total reward."""

    rollout: Rollout
    group: Group
    task: Task
    reward: float | None


def has_ledger(connection: sa.Connection) -> bool:
    return sa.inspect(connection).has_table(groups.name)


def origins(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, SessionOrigin]:
    """The origins of sessions by rollout id. Unknown rollouts are left out."""
    if not rollout_ids or not has_ledger(connection):
        return {}
    tx = Tx(connection, 0.0)
    ids = set(rollout_ids)
    owners = sa.select(rollouts.c.group_id).where(rollouts.c.id.in_(rollout_ids)).distinct()
    group_ids = [row.group_id for row in tx.all(owners)]
    by_group = load_tasks(tx, group_ids)
    return {
        rollout.id: SessionOrigin(rollout, group, by_group[group.id], rollout.total_reward)
        for group in load_groups(tx, group_ids)
        for rollout in group.rollouts
        if rollout.id in ids
    }


@dataclass(frozen=True, slots=True)
class LedgerChanges:
    """Changed rollouts and groups (`subjects`), the time of the last event, and the numbers of the events read.
    `misses_some`: there may have been others, which are forgotten."""

    subjects: frozenset[str]
    at: float
    seen: frozenset[int]
    misses_some: bool = False


def ledger_changes_since(connection: sa.Connection, at: float, seen: Collection[int] = ()) -> LedgerChanges:
    """The rollouts and groups of all events since `at` whose numbers are not in `seen`.

    An event has its transaction's time, and a later transaction may commit first. So this reads from `EVENT_MARGIN_S`
    before `at` on.
    """
    if not has_ledger(connection):
        return LedgerChanges(frozenset(), at, frozenset())
    subjects: set[str] = set()
    numbers: set[int] = set()
    last = at
    recent = sa.select(events.c.seq, events.c.at, events.c.subject, events.c.data)
    for row in connection.execute(recent.where(events.c.at >= at - EVENT_MARGIN_S)):
        numbers.add(row.seq)
        last = max(last, row.at)
        if row.seq in seen:
            continue
        subjects.add(row.subject)
        if isinstance(group_id := row.data.get("group_id"), str):
            subjects.add(group_id)
    oldest = connection.scalar(sa.select(sa.func.min(events.c.at)))
    return LedgerChanges(frozenset(subjects), last, frozenset(numbers), oldest is not None and oldest > at)


def last_event(connection: sa.Connection) -> tuple[int, float]:
    """The number of the ledger's last event and its time; 0 and 0 without any."""
    if not has_ledger(connection):
        return 0, 0.0
    row = connection.execute(sa.select(events.c.seq, events.c.at).order_by(events.c.seq.desc()).limit(1)).first()
    return (row.seq, row.at) if row is not None else (0, 0.0)


def tampered_since(connection: sa.Connection, at: float) -> set[str]:
    """The sessions with acts of tampering since `EVENT_MARGIN_S` before `at`, among the last `LAST_ACTS` acts."""
    if not has_ledger(connection):
        return set()
    last = sa.select(tampering.c.session_id, tampering.c.at).order_by(tampering.c.seq.desc()).limit(LAST_ACTS)
    return {row.session_id for row in connection.execute(last) if row.at >= at - EVENT_MARGIN_S}


def trained_policies(connection: sa.Connection, session_id: str) -> tuple[str, ...]:
    """The policies that learn from a session; none if it is no rollout's."""
    if not has_ledger(connection):
        return ()
    query = (
        sa.select(groups.c.policy)
        .join(rollouts, rollouts.c.group_id == OWNER)
        .join(attempts, attempts.c.rollout_id == rollouts.c.id)
        .where(attempts.c.session_id == session_id)
    )
    return tuple(connection.scalars(query.order_by(groups.c.id)))


def tampering_counts(connection: sa.Connection, session_ids: Sequence[str]) -> dict[str, int]:
    """The number of acts of tampering by session. Sessions without any are left out."""
    if not has_ledger(connection):
        return {}
    column = tampering.c.session_id
    query = sa.select(column, sa.func.count()).where(column.in_(session_ids)).group_by(column)
    return {row[0]: row[1] for row in connection.execute(query)}


def tampering_acts(connection: sa.Connection, session_ids: Sequence[str]) -> dict[str, list[TamperingAct]]:
    """The acts of tampering by session, in order. Sessions without any are left out."""
    acts: dict[str, list[TamperingAct]] = {}
    if has_ledger(connection):
        query = sa.select(tampering).where(tampering.c.session_id.in_(session_ids)).order_by(tampering.c.seq)
        for row in connection.execute(query):
            acts.setdefault(row.session_id, []).append(TamperingAct(TamperingKind(row.kind), row.detail))
    return acts


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group, and its row with the columns that `Group` does not have."""

    group: Group
    row: Any


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """Chooses and orders groups; empty values choose all. `words`: a part of the task's id or instruction.

    `purpose`: "training" or "evaluation". `spread`: only groups whose rewards differ. `sort`: "created_at" or
    "reward_mean".
    """

    policy: str = ""
    words: str = ""
    purpose: str = ""
    status: str = ""
    spread: bool = False
    sort: str = "created_at"
    descending: bool = True
    offset: int = 0


ALL_GROUPS = GroupQuery()

_MEASURES = sa.cast(groups.c.tags, sa.Text).like(sa.literal_column(f"'%\"{PURPOSE_TAG}={EVALUATION}\"%'"))
"""A literal, not a parameter: Postgres takes two parameters for different expressions, and so rejects the grouping."""


def _matching(query: GroupQuery) -> list[sa.ColumnElement[bool]]:
    conditions: list[sa.ColumnElement[bool]] = []
    if query.policy:
        conditions.append(groups.c.policy == query.policy)
    if query.status:
        conditions.append(groups.c.status == query.status)
    if query.purpose:
        conditions.append(_MEASURES if query.purpose == "evaluation" else ~_MEASURES)
    if query.spread:
        conditions.append(groups.c.zero_variance.is_(False))
    if query.words:
        told = sa.select(tasks.c.digest).where(tasks.c.instruction.icontains(query.words, autoescape=True))
        in_id = groups.c.task_id.icontains(query.words, autoescape=True)
        conditions.append(sa.or_(in_id, groups.c.task_digest.in_(told), groups.c.id == query.words))
    return conditions


_TASK = tasks.alias()
_WITH_TASK = sa.select(groups, sa.func.substr(_TASK.c.instruction, 1, 300).label("instruction")).join(
    _TASK, _TASK.c.digest == groups.c.task_digest
)


def group_rows(
    connection: sa.Connection, query: GroupQuery = ALL_GROUPS, limit: int = 50, before: str | None = None
) -> list[GroupRow]:
    """A page of groups. `before` is the last id of the previous page, for the newest first."""
    if not has_ledger(connection):
        return []
    column = groups.c.reward_mean if query.sort == "reward_mean" else groups.c.created_at
    order = column.desc().nulls_last() if query.descending else column.asc().nulls_last()
    found = _WITH_TASK.where(*_matching(query)).order_by(order, groups.c.id.desc()).limit(limit).offset(query.offset)
    if before is not None:
        last = sa.select(groups.c.created_at).where(groups.c.id == before).scalar_subquery()
        found = found.where(sa.tuple_(groups.c.created_at, groups.c.id) < sa.tuple_(last, sa.literal(before)))
    tx = Tx(connection, 0.0)
    rows = tx.all(found)
    loaded = {group.id: group for group in load_groups(tx, [row.id for row in rows])}
    return [GroupRow(loaded[row.id], row) for row in rows]


def group_counts(connection: sa.Connection, query: GroupQuery) -> list[tuple[str, str, bool, int]]:
    """How many groups of the query there are, by policy, status, and whether they measure."""
    if not has_ledger(connection):
        return []
    measures = sa.case((_MEASURES, 1), else_=0)
    columns = groups.c.policy, groups.c.status, measures
    counted = sa.select(*columns, sa.func.count()).where(*_matching(query)).group_by(*columns)
    return [(policy, status, bool(measures), count) for policy, status, measures, count in connection.execute(counted)]


def group_row(connection: sa.Connection, group_id: str) -> tuple[GroupRow, Task]:
    """The group with its task. Raises `NotFound`."""
    tx = Tx(connection, 0.0)
    row = tx.first(_WITH_TASK.where(groups.c.id == group_id)) if has_ledger(connection) else None
    if row is None:
        raise no_group(tx, group_id) if has_ledger(connection) else NotFound(f"no group {group_id!r}", param="group_id")
    return GroupRow(load_groups(tx, [group_id])[0], row), load_tasks(tx, [group_id])[group_id]


def seen_by_evaluators(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, str]:
    """The text that the evaluator of each rollout's last attempt saw, by rollout id."""
    query = sa.select(evaluations).where(evaluations.c.rollout_id.in_(rollout_ids))
    return {row.rollout_id: unpack_bytes(row.seen).decode(errors="replace") for row in connection.execute(query)}


def attempt_counts(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, int]:
    """The number of started attempts by rollout id."""
    column = attempts.c.rollout_id
    query = sa.select(column, sa.func.count()).where(column.in_(rollout_ids)).group_by(column)
    return {row[0]: row[1] for row in connection.execute(query)}


@dataclass(frozen=True, slots=True)
class PolicyCounts:
    """A policy with the number of its groups and rollouts by status."""

    name: str
    version: int
    paused: str | None
    groups: Mapping[str, int]
    rollouts: Mapping[str, int]
    first_at: float | None
    last_at: float | None
    reward: float | None


def policy_counts(connection: sa.Connection) -> list[PolicyCounts]:
    """Every policy by name, with the mean of its complete groups' mean rewards."""
    if not has_ledger(connection):
        return []
    spans = sa.select(
        groups.c.policy,
        sa.func.min(groups.c.created_at).label("first"),
        sa.func.max(sa.func.coalesce(groups.c.completed_at, groups.c.created_at)).label("last"),
        sa.func.avg(groups.c.reward_mean).label("reward"),
    ).group_by(groups.c.policy)
    times = {row.policy: row for row in connection.execute(spans)}
    rows = connection.execute(sa.select(policies).order_by(policies.c.name)).all()
    counts = {row.name: counted(Tx(connection, 0.0), row.name) for row in rows}
    return [
        PolicyCounts(
            name=row.name,
            version=row.version,
            paused=row.paused,
            groups=counts[row.name]["groups"],
            rollouts=counts[row.name]["rollouts"],
            first_at=times[row.name].first if row.name in times else None,
            last_at=times[row.name].last if row.name in times else None,
            reward=times[row.name].reward if row.name in times else None,
        )
        for row in rows
    ]


def rewarded_rollouts(
    connection: sa.Connection, policy: str, first: int, last: int, task_id: str | None = None
) -> Sequence[Any]:
    """Scored and masked rollouts with a reward whose trained tokens all have versions `first` to `last`, of one task if
    given. Includes rollouts without trained tokens (evaluations), with version -1. The columns are named as in
    `ComparedRollout`."""
    if not has_ledger(connection):
        return []
    value = sa.func.sum(rewards.c.value).label("reward")
    names = (groups.c.task_id, groups.c.id.label("group_id"), rollouts.c.id.label("rollout_id"), rollouts.c.session_id)
    own = sa.and_(rollout_policies.c.rollout_id == rollouts.c.id, rollout_policies.c.policy == policy)
    oldest = sa.func.coalesce(rollout_policies.c.oldest_version, rollouts.c.oldest_version)
    newest = sa.func.coalesce(rollout_policies.c.newest_version, rollouts.c.newest_version)
    query = (
        sa.select(*names, oldest.label("first_version"), newest.label("last_version"), value)
        .join(groups, rollouts.c.group_id == OWNER)
        .outerjoin(rollout_policies, own)
        .join(rewards, sa.and_(rewards.c.rollout_id == rollouts.c.id, rewards.c.attempt == rollouts.c.attempt))
        .where(sa.or_(sa.and_(oldest >= first, newest <= last), oldest == NO_VERSION))
        .where(groups.c.policy == policy, rewards.c.scope == "rollout")
        .where(rollouts.c.scoring != Scoring.UNSCORABLE, rollouts.c.session_id.is_not(None))
        .group_by(groups.c.task_id, groups.c.id, rollouts.c.id, rollouts.c.session_id, oldest, newest)
        .order_by(groups.c.task_id, rollouts.c.id)
    )
    return connection.execute(query if task_id is None else query.where(groups.c.task_id == task_id)).all()


def completed_groups(connection: sa.Connection, policy: str, limit: int) -> Sequence[Any]:
    """The rows of the policy's last `limit` completed groups, in order of completion."""
    if not has_ledger(connection):
        return []
    ended = groups.c.completed_at
    last = sa.select(groups).where(groups.c.policy == policy, ended.is_not(None)).order_by(ended.desc(), groups.c.id)
    return connection.execute(last.limit(limit)).all()[::-1]


GIVEN_UP = 20
"""Maximum number of listed dead groups."""


@dataclass(frozen=True, slots=True)
class LeaseLine:
    """An open lease. `step` is the last one that its trainer acknowledged."""

    trainer: str
    groups: int
    replay: bool
    step: int | None
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A node with claims on the policy's rollouts, which expire at `expires_at` without a heartbeat."""

    name: str
    rollouts: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class DeadLine:
    """A dead group with the last reason."""

    group_id: str
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunState:
    """`waiting_tasks`: submitted tasks without a group. `waiting_rollouts`: unclaimed rollouts of open groups."""

    waiting_tasks: int
    waiting_rollouts: int
    leases: tuple[LeaseLine, ...]
    nodes: tuple[NodeLine, ...]
    dead: tuple[DeadLine, ...]


def run_state(connection: sa.Connection, policy: str) -> RunState:
    if not has_ledger(connection):
        return RunState(0, 0, (), (), ())
    tx = Tx(connection, 0.0)
    tasks = sa.select(sa.func.count()).select_from(submitted.join(submissions))
    tasks = tasks.where(submitted.c.group_id.is_(None), trains(tx, policy), submissions.c.cancelled_at.is_(None))
    of_policy = sa.select(OWNER).where(groups.c.policy == policy, groups.c.status == GroupStatus.OPEN)
    waiting = sa.select(sa.func.count()).where(
        rollouts.c.group_id.in_(of_policy), rollouts.c.status == "pending", rollouts.c.node.is_(None)
    )
    return RunState(
        tx.scalar(tasks) or 0,
        tx.scalar(waiting) or 0,
        tuple(LeaseLine(*row) for row in tx.all(_leases(policy))),
        tuple(NodeLine(*row) for row in tx.all(_nodes(policy))),
        tuple(DeadLine(*row) for row in tx.all(_dead(policy))),
    )


def _leases(policy: str) -> sa.Select[*tuple[Any, ...]]:
    groups = sa.select(sa.func.count()).where(lease_groups.c.token == leases.c.token).scalar_subquery()
    return (
        sa.select(leases.c.trainer, groups, leases.c.replay, trainers.c.step, leases.c.created_at, leases.c.expires_at)
        .join(trainers, trainers.c.name == leases.c.trainer)
        .where(leases.c.policy == policy, leases.c.status == "open")
        .order_by(leases.c.created_at)
    )


def _nodes(policy: str) -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(rollouts.c.node, sa.func.count(), sa.func.max(rollouts.c.node_expires_at))
        .join(groups, rollouts.c.group_id == OWNER)
        .where(groups.c.policy == policy, rollouts.c.node_expires_at.is_not(None), rollouts.c.node.is_not(None))
        .where(rollouts.c.status.in_(("pending", "running")))
        .group_by(rollouts.c.node)
        .order_by(rollouts.c.node)
    )


def _dead(policy: str) -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(groups.c.id, groups.c.failures, groups.c.reason)
        .where(groups.c.policy == policy, groups.c.status == GroupStatus.DEAD)
        .order_by(groups.c.created_at.desc())
        .limit(GIVEN_UP)
    )


PAGE = 100


async def all_groups(database: Database) -> AsyncIterator[tuple[Group, Task]]:
    """Every group with its rollouts, rewards and task, streamed; none if the ledger has no tables yet."""
    after = ""
    while page := await database.query(lambda connection, after=after: _page(connection, after)):
        for group_and_task in page:
            yield group_and_task
        after = page[-1][0].id


def _page(connection: sa.Connection, after: str) -> list[tuple[Group, Task]]:
    if not sa.inspect(connection).has_table(groups.name):
        return []
    tx = Tx(connection, 0.0)
    query = sa.select(groups.c.id).where(groups.c.id > after).order_by(groups.c.id).limit(PAGE)
    ids = [row.id for row in tx.all(query)]
    tasks = load_tasks(tx, ids)
    groups_by_id = {group.id: group for group in load_groups(tx, ids)}
    return [(groups_by_id[group_id], tasks[group_id]) for group_id in ids]


_USES: Mapping[str, GroupUse] = {
    GroupStatus.ACKNOWLEDGED: GroupUse.ACKNOWLEDGED,
    GroupStatus.STALE: GroupUse.ABANDONED,
    GroupStatus.DEAD: GroupUse.ABANDONED,
    GroupStatus.DROPPED: GroupUse.ABANDONED,
}


_FIRST = (GroupUse.WAITING, GroupUse.REPLAYED, GroupUse.ACKNOWLEDGED, GroupUse.ABANDONED)


def group_uses(connection: sa.Connection, session_ids: Sequence[str]) -> dict[str, tuple[GroupUse, float | None]]:
    """The use of the groups of sessions, and when a group was acknowledged. Sessions without a group are left out.

    Of several groups that train the same rollouts, the first use in the order of `_FIRST` counts.

    Sessions of a rollout's earlier attempts have the same use as that of its last attempt.
    """
    if not session_ids or not sa.inspect(connection).has_table(groups.name):
        return {}
    leased_groups = sa.select(lease_groups.c.group_id).join(leases, leases.c.token == lease_groups.c.token)
    replayed = groups.c.id.in_(leased_groups.where(leases.c.status == "open"))
    query = (
        sa.select(attempts.c.session_id, groups.c.status, groups.c.acked_at, replayed.label("leased"))
        .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .join(groups, sa.or_(groups.c.id == rollouts.c.group_id, groups.c.shares == rollouts.c.group_id))
        .where(attempts.c.session_id.in_(session_ids))
    )
    use_by_session: dict[str, tuple[GroupUse, float | None]] = {}
    for row in connection.execute(query):
        use = _USES.get(row.status, GroupUse.WAITING)
        if row.leased and use is not GroupUse.WAITING:
            use = GroupUse.REPLAYED
        known, acked_at = use_by_session.get(row.session_id, (use, None))
        times = [at for at in (acked_at, row.acked_at) if at is not None]
        use_by_session[row.session_id] = (min(use, known, key=_FIRST.index), max(times, default=None))
    return use_by_session
