"""Retention of the ledger's own rows. `rolltap log prune --ledger-older-than`.

A group goes, with those that share its rollouts, if all of them were over (acknowledged, stale, dead or dropped) before
a given time, no open lease has them, they are not of their trainer's last step, their submission is over, and the log
has no more calls of their sessions. Their rollouts, attempts and rewards go too, and then the ended leases and the
submitted tasks that are of no other group. The submission's own row and the tasks stay. A submission whose last part
came before the given time, and others never, goes as well.

A row of `pruned_groups` stays in a group's place: its id can't be used again, a rewind tells how many of the groups
that it should bring back are gone, and the digest of its rewards proves what they were (`check_documents`). The counts
of policies stay what they were.

Each transaction removes some groups, and never waits for another one's groups.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from rolltap.calllog.backend import database_clock
from rolltap.calllog.database import Database
from rolltap.calllog.schema import call_intents
from rolltap.calllog.spool import sync_folder
from rolltap.crash import crash_point
from rolltap.errors import ConfigError
from rolltap.ledger.rewards import FIELDS, chained_hash, rewards_digest
from rolltap.ledger.schema import (
    OWNER,
    attempts,
    evaluations,
    events,
    groups,
    lease_groups,
    leases,
    partial_submissions,
    pruned_groups,
    rewards,
    rollout_policies,
    rollouts,
    submissions,
    submitted,
    trainers,
)
from rolltap.tenants import EVERY_TENANT, acting_for
from rolltap.types import GroupStatus, RolloutStatus

PAGE = 200
GROUPS_AT_ONCE = 20
LEASES_AT_ONCE = 5_000

FINAL = (GroupStatus.ACKNOWLEDGED, GroupStatus.STALE, GroupStatus.DEAD, GroupStatus.DROPPED)
ENDED = tuple(status for status in RolloutStatus if status.terminal)


class GroupReason(StrEnum):
    """Why a group's rows are removed or kept."""

    OVER = "over, its calls are gone"
    WAITING = "open, ready or leased"
    REPLAYED = "leased for replay"
    RECENT = "over too recently"
    LAST_STEP = "of its trainer's last step"
    SUBMISSION = "its submission goes on"
    CALLS = "its calls are on record"


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The decision on a group's rows, and on those of the groups that share its rollouts."""

    group_id: str
    rollouts: int
    reason: GroupReason

    @property
    def removes(self) -> bool:
        return self.reason is GroupReason.OVER


@dataclass(frozen=True, slots=True)
class LedgerPruned:
    """The numbers of removed rows. A group that shares another one's rollouts counts as well."""

    groups: int = 0
    rollouts: int = 0
    rewards: int = 0
    leases: int = 0
    tasks: int = 0

    def __add__(self, other: LedgerPruned) -> LedgerPruned:
        return LedgerPruned(*map(sum, zip(astuple(self), astuple(other), strict=True)))


KeepRewards = Callable[[Sequence[tuple[str, Sequence[Mapping[str, Any]]]]], None]
"""Keeps the rewards of groups, by group id, before they are removed."""


async def plan_ledger_pruning(
    database: Database, *, before: float, going: Collection[str] = frozenset()
) -> list[GroupDecision]:
    """The decision on every group with rollouts of its own, if the calls of the sessions `going` were gone. Changes
    nothing."""
    decisions: list[GroupDecision] = []
    after = ""
    while True:
        own = sa.select(groups.c.id).where(groups.c.shares.is_(None), groups.c.id > after)
        query = own.order_by(groups.c.id).limit(PAGE)

        def page(connection: sa.Connection, query: sa.Select[Any] = query) -> list[GroupDecision]:
            return _decide(connection, list(connection.scalars(query)), before, going)

        on_page = await database.query(page)
        if not on_page:
            return decisions
        decisions += on_page
        after = on_page[-1].group_id


async def prune_ledger(
    database: Database,
    decisions: Iterable[GroupDecision],
    *,
    before: float,
    keep: KeepRewards | None = None,
    show: Callable[[int], None] = lambda done: None,
) -> LedgerPruned:
    """Removes the groups that `decisions` allow, some per transaction, which decides again; then what was theirs.

    `keep` runs in the transaction that removes the rewards, before it ends.
    """
    removed = LedgerPruned()
    for some in _portions((each.group_id for each in decisions if each.removes), GROUPS_AT_ONCE):

        def remove(connection: sa.Connection, ids: Sequence[str] = some) -> LedgerPruned:
            free = [each for each in _decide(connection, _locked(connection, ids), before) if each.removes]
            gone = _remove(connection, [each.group_id for each in free], keep) if free else LedgerPruned()
            crash_point("ledger.pruning")
            return gone

        removed += await database.transact(remove)
        show(removed.groups)
    after = 0
    while after is not None:
        after, count = await database.transact(
            lambda connection, after=after: _remove_leases(connection, after, before)
        )
        removed += LedgerPruned(leases=count)
    while count := await database.transact(lambda connection: _remove_submitted(connection, before)):
        removed += LedgerPruned(tasks=count)
    await database.transact(
        lambda connection: connection.execute(sa.delete(partial_submissions).where(partial_submissions.c.at < before))
    )
    return removed


T = TypeVar("T")


def _portions(items: Iterable[T], most: int) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, most)):
        yield some


def _locked(connection: sa.Connection, ids: Sequence[str]) -> list[str]:
    """Those of the groups that no other transaction has locked, nor a group that shares their rollouts, locked."""
    members = sa.or_(groups.c.id.in_(ids), groups.c.shares.in_(ids))
    owner_of = {
        row.id: row.owner for row in connection.execute(sa.select(groups.c.id, OWNER.label("owner")).where(members))
    }
    free = sa.select(groups.c.id).where(members).order_by(groups.c.id).with_for_update(skip_locked=True)
    busy = {owner_of[id] for id in owner_of.keys() - set(connection.scalars(free))}
    return [id for id in ids if id in owner_of and id not in busy]


def _decide(
    connection: sa.Connection, ids: Sequence[str], before: float, going: Collection[str] = frozenset()
) -> list[GroupDecision]:
    """The decisions on the groups, in the order of `ids`."""
    members: defaultdict[str, list[Any]] = defaultdict(list)
    query = sa.select(groups, OWNER.label("owner")).where(sa.or_(groups.c.id.in_(ids), groups.c.shares.in_(ids)))
    for row in connection.execute(query):
        members[row.owner].append(row)
    own: defaultdict[str, list[Any]] = defaultdict(list)
    for row in connection.execute(sa.select(rollouts).where(rollouts.c.group_id.in_(ids))):
        own[row.group_id].append(row)
    steps = {row.name: row.step for row in connection.execute(sa.select(trainers.c.name, trainers.c.step))}
    all_ids = [row.id for rows in members.values() for row in rows]
    leased = _leased(connection, all_ids)
    last_rewards = _last_rewards(connection, ids)
    recorded = _with_calls(connection, ids, going)
    unfinished = _unfinished(connection, {row.submission_id for rows in members.values() for row in rows} - {None})

    def reason(id: str) -> GroupReason:
        times = [last_rewards.get(id), *(row.finished_at for row in own[id])]
        times += [at for row in members[id] for at in (row.created_at, row.completed_at, row.acked_at)]
        is_last = (row for row in members[id] if row.acked_step is not None)
        if any(row.status not in FINAL for row in members[id]) or any(row.status not in ENDED for row in own[id]):
            return GroupReason.WAITING
        if any(row.id in leased for row in members[id]):
            return GroupReason.REPLAYED
        if max(at for at in times if at is not None) > before:
            return GroupReason.RECENT
        if any(row.acked_step >= (steps.get(row.acked_by) or 0) for row in is_last):
            return GroupReason.LAST_STEP
        if any(row.submission_id in unfinished for row in members[id]):
            return GroupReason.SUBMISSION
        return GroupReason.CALLS if id in recorded else GroupReason.OVER

    return [GroupDecision(id, len(own[id]), reason(id)) for id in ids]


def _leased(connection: sa.Connection, group_ids: Sequence[str]) -> set[str]:
    """Those of the groups that an open lease has."""
    joined = sa.select(lease_groups.c.group_id).join(leases, leases.c.token == lease_groups.c.token)
    return set(connection.scalars(joined.where(lease_groups.c.group_id.in_(group_ids), leases.c.status == "open")))


def _last_rewards(connection: sa.Connection, ids: Sequence[str]) -> dict[str, float]:
    """When each group got its last reward."""
    joined = sa.select(rollouts.c.group_id, sa.func.max(rewards.c.created_at))
    joined = joined.join(rewards, rewards.c.rollout_id == rollouts.c.id).where(rollouts.c.group_id.in_(ids))
    return dict(map(tuple, connection.execute(joined.group_by(rollouts.c.group_id))))


def _with_calls(connection: sa.Connection, ids: Sequence[str], going: Collection[str]) -> set[str]:
    """Those of the groups with calls of a session that is not `going`."""
    has_calls = sa.exists().where(call_intents.c.session_id == attempts.c.session_id)
    query = sa.select(rollouts.c.group_id, attempts.c.session_id)
    query = query.join(attempts, attempts.c.rollout_id == rollouts.c.id)
    rows = connection.execute(query.where(rollouts.c.group_id.in_(ids), has_calls))
    return {row.group_id for row in rows if row.session_id not in going}


def _unfinished(connection: sa.Connection, submission_ids: Collection[str]) -> set[str]:
    """Those of the submissions with queued tasks or open groups."""
    queued = sa.select(submitted.c.submission_id).join(submissions, submissions.c.id == submitted.c.submission_id)
    queued = queued.where(submitted.c.group_id.is_(None), submissions.c.cancelled_at.is_(None))
    is_open = sa.select(groups.c.submission_id).where(groups.c.status == GroupStatus.OPEN)
    return {
        id
        for query, column in ((queued, submitted.c.submission_id), (is_open, groups.c.submission_id))
        for id in connection.scalars(query.where(column.in_(submission_ids)).distinct())
    }


def _remove(connection: sa.Connection, ids: Sequence[str], keep: KeepRewards | None) -> LedgerPruned:
    """Removes the locked groups and those that share their rollouts, with all that is theirs."""
    at = database_clock(connection)
    own = sa.select(rollouts.c.id).where(rollouts.c.group_id.in_(ids))
    heads: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    count: defaultdict[str, int] = defaultdict(int)
    for row in connection.execute(sa.select(rollouts).where(rollouts.c.group_id.in_(ids))):
        count[row.group_id] += 1
        if row.reward_head:
            heads[row.group_id].append((row.id, row.reward_head))
    rewards_of: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    ordered = sa.select(rewards, rollouts.c.group_id).join(rollouts, rollouts.c.id == rewards.c.rollout_id)
    ordered = ordered.where(rollouts.c.group_id.in_(ids)).order_by(rewards.c.rollout_id, rewards.c.number)
    for row in connection.execute(ordered):
        rewards_of[row.group_id].append({name: row._mapping[name] for name in FIELDS})
    if keep is not None:
        keep([(id, rewards_of[id]) for id in ids if rewards_of[id]])
    members = connection.execute(sa.select(groups).where(sa.or_(groups.c.id.in_(ids), groups.c.shares.in_(ids)))).all()
    rows = [
        {
            **{name: row._mapping[name] for name in ("policy", "status", "acked_by", "acked_step")},
            "group_id": row.id,
            "at": at,
            "rollouts": count[row.id],
            "rewards": len(rewards_of[row.id]),
            "digest": rewards_digest(heads[row.id]),
        }
        for row in members
    ]
    connection.execute(pruned_groups.insert(), rows)
    for table in (rewards, evaluations, rollout_policies, attempts):
        connection.execute(sa.delete(table).where(table.c.rollout_id.in_(own)))
    connection.execute(sa.delete(rollouts).where(rollouts.c.group_id.in_(ids)))
    gone = [row.id for row in members]
    connection.execute(sa.delete(lease_groups).where(lease_groups.c.group_id.in_(gone)))
    connection.execute(sa.delete(groups).where(groups.c.id.in_(gone)))
    noted = [{"at": at, "kind": "group_pruned", "subject": row.id, "data": {"policy": row.policy}} for row in members]
    connection.execute(events.insert(), noted)
    return LedgerPruned(len(gone), sum(count.values()), sum(map(len, rewards_of.values())))


def _remove_leases(connection: sa.Connection, after: int, before: float) -> tuple[int | None, int]:
    """Removes some ended leases after the token `after` that have no groups any more; returns the last one's token,
    None if there were none, and their number. Each trainer's last acknowledgement of a policy stays."""
    acknowledged = sa.select(sa.func.max(leases.c.token)).where(leases.c.status == "acknowledged")
    last = acknowledged.group_by(leases.c.trainer, leases.c.policy, leases.c.replay)
    is_old = sa.and_(leases.c.status != "open", leases.c.created_at < before)
    is_empty = ~sa.exists().where(lease_groups.c.token == leases.c.token)
    some = sa.select(leases.c.token).where(leases.c.token > after, is_old, is_empty, leases.c.token.not_in(last))
    some = some.order_by(leases.c.token).limit(LEASES_AT_ONCE).with_for_update(skip_locked=True)
    tokens = list(connection.scalars(some))
    connection.execute(sa.delete(leases).where(leases.c.token.in_(tokens)))
    return (tokens[-1] if tokens else None), len(tokens)


def _remove_submitted(connection: sa.Connection, before: float) -> int:
    """Removes the tasks of a submission whose groups are all gone; returns their number, 0 if there is none."""
    is_queued = sa.exists().where(submitted.c.submission_id == submissions.c.id, submitted.c.group_id.is_(None))
    is_over = sa.or_(submissions.c.cancelled_at < before, sa.and_(submissions.c.cancelled_at.is_(None), ~is_queued))
    has_groups = sa.exists().where(groups.c.submission_id == submissions.c.id)
    has_tasks = sa.exists().where(submitted.c.submission_id == submissions.c.id)
    some = sa.select(submissions.c.id).where(submissions.c.created_at < before, is_over, ~has_groups, has_tasks)
    id = connection.scalar(some.limit(1).with_for_update(skip_locked=True))
    return connection.execute(sa.delete(submitted).where(submitted.c.submission_id == id)).rowcount if id else 0


@contextmanager
def rewards_document(path: Path | None) -> Iterator[KeepRewards | None]:
    """Writes the rewards of removed groups to a new file, a line of JSON a group. What was removed is on disk."""
    if path is None:
        yield None
        return
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{path} is there already; name a new file for the rewards") from None
    with file:
        sync_folder(path.parent)

        def keep(rewards_of: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> None:
            for group_id, rows in rewards_of:
                file.write(json.dumps({"group_id": group_id, "rewards": rows}) + "\n")
            file.flush()
            os.fsync(file.fileno())

        yield keep


@dataclass(slots=True)
class CheckedDocuments:
    """The number of pruned groups whose rewards are those that the documents have, and the problems."""

    groups: int = 0
    problems: list[str] = field(default_factory=list)


async def check_documents(database: Database, paths: Iterable[Path]) -> CheckedDocuments:
    """Compares the documents of `rewards_document` with the digests that are kept of pruned groups.

    A prune that broke off may have written groups that are still on record: these are passed over, and so is a group
    that a later document has as it was when it went.
    """
    report = CheckedDocuments()
    differing: dict[str, str] = {}
    for path in paths:
        for some in _portions(_documented(path), PAGE):
            known = await _digests(database, [group_id for group_id, _ in some])
            for group_id, digest in some:
                if digest in known.get(group_id, ()):
                    report.groups += 1
                    differing.pop(group_id, None)
                elif group_id not in known:
                    differing[group_id] = f"{path}: group {group_id} was never in this store"
                elif known[group_id]:
                    differing[group_id] = f"{path}: group {group_id} has other rewards than those that were pruned"
    report.problems += differing.values()
    return report


def _documented(path: Path) -> Iterator[tuple[str, str | None]]:
    """The groups of a document, each with the digest of its rewards; a last line that broke off is left out."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                group = json.loads(line)
                heads: dict[str, str] = {}
                for row in group["rewards"]:
                    heads[row["rollout_id"]] = chained_hash(heads.get(row["rollout_id"], ""), row)
                yield group["group_id"], rewards_digest(heads.items())
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{path}, line {number}: this is no group of `rolltap log prune --rewards`") from None


async def _digests(database: Database, ids: Sequence[str]) -> dict[str, set[str]]:
    """The digests of pruned groups by id, of any tenant; none of a group that is on record."""
    pruned = sa.select(pruned_groups.c.group_id, pruned_groups.c.digest).where(pruned_groups.c.group_id.in_(ids))
    living = sa.select(groups.c.id).where(groups.c.id.in_(ids))

    def read(connection: sa.Connection) -> dict[str, set[str]]:
        known: dict[str, set[str]] = {id: set() for id in connection.scalars(living)}
        for row in connection.execute(pruned):
            known.setdefault(row.group_id, set()).add(row.digest or "")
        return known

    with acting_for(EVERY_TENANT):
        return await database.query(read)
