"""Retention: removes the calls of sessions that are no longer needed. `rolltap log prune`.

A session's calls may be removed if the session ended before a given time and

* its group was acknowledged by its trainer before that time and is not leased; or
* its group will not be trained (stale, dead or dropped), or it has no group, and an archive of `rolltap log export`
  contains exactly its calls.

All others are kept, with a reason; so is a session from which one that stays was forked. The session's own row stays,
so its key is still refused as closed, and a row in `prunings` records the removal. Annotations of the calls are removed
too. Large request parts without references are removed last, except recently used ones: a writer may be about to refer
to them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rolltap.calllog.archive import read_archive
from rolltap.calllog.archive_block import calls_digest, check_block
from rolltap.calllog.backend import Insert, database_clock
from rolltap.calllog.codec import split_hashes
from rolltap.calllog.database import Database
from rolltap.calllog.schema import annotations, call_completions, call_intents, deliveries, parts, prunings, sessions
from rolltap.errors import RecordCorrupt
from rolltap.tenants import EVERY_TENANT, acting_for

log = logging.getLogger("rolltap.calllog")

PAGE = 200
PART_SPARED_S = 86_400.0
"""Seconds for which unused parts stay. A writer assumes for an hour that a part which it wrote is there."""


class GroupUse(StrEnum):
    """Whether the trainer still needs a session's group, by the ledger."""

    WAITING = "waiting"  # open, complete or leased: it is still to be trained
    ACKNOWLEDGED = "acknowledged"
    REPLAYED = "replayed"  # acknowledged, and leased again
    ABANDONED = "abandoned"  # stale, dead or dropped


GroupUses = Callable[[sa.Connection, Sequence[str]], Mapping[str, tuple[GroupUse, float | None]]]
"""The use of the groups of sessions, by session id, and when a group was acknowledged. Others have no group."""


class Reason(StrEnum):
    """Why a session's calls are removed or kept."""

    ACKNOWLEDGED = "acknowledged"
    EXPORTED = "exported"
    OPEN = "open"
    UNDER_WAY = "a call is under way"
    RECENT = "ended too recently"
    WAITING = "its group waits to be trained"
    ACKNOWLEDGED_RECENTLY = "acknowledged too recently: a trainer may rewind"
    REPLAYED = "leased for replay"
    NOT_EXPORTED = "not exported"
    CHANGED = "has gone on since its export"
    FORKED = "a session that stays was forked from it"


REMOVES = (Reason.ACKNOWLEDGED, Reason.EXPORTED)


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """The decision on one session's calls."""

    session_id: str
    calls: int
    reason: Reason

    @property
    def removes(self) -> bool:
        return self.reason in REMOVES


def exported_in(archives: Iterable[Path]) -> dict[str, bytes]:
    """The digest of every archived session's calls, by session id, but of those that no import would bring back. Reads
    the archives completely."""
    digests: dict[str, bytes] = {}
    for path in archives:
        for block in read_archive(path):
            try:
                check_block(block)
            except RecordCorrupt as error:
                log.warning("%s keeps one session less: %s", path, error.message)
            else:
                digests[block.session[0]] = block.digest()
    return digests


async def plan_pruning(
    database: Database, *, before: float, exported: Mapping[str, bytes], uses: GroupUses
) -> list[PruneDecision]:
    """The decision on every session that has calls, the oldest first. Changes nothing."""
    decisions: list[PruneDecision] = []
    after = ""
    now = await database.now()
    while True:
        query = sa.select(sessions).where(sessions.c.id > after).order_by(sessions.c.id).limit(PAGE)

        def page(connection: sa.Connection, query: sa.Select[Any] = query) -> tuple[str, list[PruneDecision]]:
            rows = connection.execute(query).all()
            ids = [row.id for row in rows]
            use_of, counts_of = uses(connection, ids), _counts(connection, ids)
            on_page = [
                _decide(connection, row, use_of.get(row.id), counts_of[row.id], exported, (before, now))
                for row in rows
                if row.id in counts_of
            ]
            return rows[-1].id if rows else "", on_page

        after, on_page = await database.query(page)
        if not after:
            forks = await database.query(lambda connection: _forks(connection, now))
            return _with_origins_kept(decisions, forks)
        decisions += on_page


def _forks(connection: sa.Connection, now: float, of: str | None = None) -> Mapping[str, tuple[str, bool]]:
    """The sessions that were forked, all or `of` one session: their origin's session, and whether they are open."""
    columns = sessions.c
    is_open = sa.and_(columns.closed_at.is_(None), columns.expires_at > now)
    query = sa.select(columns.id, columns.origin_session, is_open).where(columns.origin_session.is_not(None))
    rows = connection.execute(query if of is None else query.where(columns.origin_session == of))
    return {row[0]: (row[1], bool(row[2])) for row in rows}


def _with_origins_kept(
    decisions: Sequence[PruneDecision], forks: Mapping[str, tuple[str, bool]]
) -> list[PruneDecision]:
    """The decisions, but the origins of forks that stay, stay. A fork stays if it is open, or if its calls stay."""
    stays = {decision.session_id for decision in decisions if not decision.removes}
    needed = [fork for fork, (_, is_open) in forks.items() if is_open or fork in stays]
    origins: set[str] = set()
    while needed:
        origin = forks[needed.pop()][0]
        if origin not in origins:
            origins.add(origin)
            needed += [origin] if origin in forks else []
    return [
        replace(each, reason=Reason.FORKED) if each.removes and each.session_id in origins else each
        for each in decisions
    ]


def _decide(
    connection: sa.Connection,
    session: sa.Row[Any],
    use: tuple[GroupUse, float | None] | None,
    counts: tuple[int, int],
    exported: Mapping[str, bytes],
    times: tuple[float, float],
) -> PruneDecision:
    calls, unfinished = counts
    reason = _reason_without_exports(session, use, unfinished, *times)
    if reason is None:
        digest = exported.get(session.id)
        if digest is None:
            reason = Reason.NOT_EXPORTED
        else:
            reason = Reason.EXPORTED if digest == _digest(connection, session.id) else Reason.CHANGED
    return PruneDecision(session.id, calls, reason)


def _reason_without_exports(
    session: sa.Row[Any], use: tuple[GroupUse, float | None] | None, unfinished: int, before: float, now: float
) -> Reason | None:
    """The reason, if it does not depend on exports; else None."""
    ended = session.closed_at if session.closed_at is not None else session.expires_at
    if session.closed_at is None and session.expires_at > now:
        return Reason.OPEN
    if unfinished:
        return Reason.UNDER_WAY
    if ended > before:
        return Reason.RECENT
    if use is None or use[0] is GroupUse.ABANDONED:
        return None
    if use[0] is GroupUse.ACKNOWLEDGED:
        acknowledged_at = use[1]
        is_recent = acknowledged_at is None or acknowledged_at > before
        return Reason.ACKNOWLEDGED_RECENTLY if is_recent else Reason.ACKNOWLEDGED
    return Reason.REPLAYED if use[0] is GroupUse.REPLAYED else Reason.WAITING


def _counts(connection: sa.Connection, session_ids: Collection[str]) -> dict[str, tuple[int, int]]:
    """The number of each session's calls, and of those without completion. Sessions without calls are left out."""
    session_id = call_intents.c.session_id
    columns = session_id, sa.func.count(), sa.func.count(call_completions.c.call_id)
    joined = call_intents.outerjoin(call_completions, call_completions.c.call_id == call_intents.c.id)
    query = sa.select(*columns).select_from(joined).where(session_id.in_(session_ids)).group_by(session_id)
    return {own: (calls, calls - completed) for own, calls, completed in connection.execute(query)}


def _digest(connection: sa.Connection, session_id: str) -> bytes:
    own = call_intents.c.session_id == session_id

    def pairs(key: sa.Column[Any], value: sa.Column[Any]) -> Iterator[tuple[str, int]]:
        source = key.table
        if source is not call_intents:
            source = source.join(call_intents, call_intents.c.id == key)
        query = sa.select(key, value).select_from(source).where(own)
        return ((row[0], row[1]) for row in connection.execute(query))

    return calls_digest(
        pairs(call_intents.c.id, call_intents.c.crc),
        pairs(call_completions.c.call_id, call_completions.c.crc),
        ((key, bool(value)) for key, value in pairs(deliveries.c.call_id, deliveries.c.delivered)),
        pairs(annotations.c.call_id, annotations.c.token),
    )


@dataclass(frozen=True, slots=True)
class PruneResult:
    """The numbers of removed sessions, calls and parts."""

    sessions: int
    calls: int
    parts: int


async def prune(
    database: Database,
    *,
    before: float,
    exported: Mapping[str, bytes],
    uses: GroupUses,
    show: Callable[[int], None] = lambda done: None,
) -> PruneResult:
    """Removes what `plan_pruning` allows, one session per transaction, which makes the decision again.

    The newest sessions go first: forks before those that they were forked from.
    """
    plan = await plan_pruning(database, before=before, exported=exported, uses=uses)
    record = Insert(prunings, database.dialect, replace="true")
    removed_sessions = calls = 0
    for done, planned in enumerate((decision for decision in reversed(plan) if decision.removes), 1):

        def remove(connection: sa.Connection, session_id: str = planned.session_id) -> int:
            locked = sa.select(sessions).where(sessions.c.id == session_id).with_for_update()
            session = connection.execute(locked).one()
            use = uses(connection, [session_id]).get(session_id)
            now = database_clock(connection)
            forks = _forks(connection, now, of=session_id)
            counts_of = _counts(connection, [session_id, *forks])
            needed = any(is_open or fork in counts_of for fork, (_, is_open) in forks.items())
            if session_id not in counts_of or needed:
                return 0
            decision = _decide(connection, session, use, counts_of[session_id], exported, (before, before))
            if not decision.removes:
                return 0
            record.run(connection, [(session_id, now, decision.calls, decision.reason.value)])
            own = sa.select(call_intents.c.id).where(call_intents.c.session_id == session_id)
            for table in (deliveries, call_completions):
                connection.execute(sa.delete(table).where(table.c.call_id.in_(own)))
            for table in (annotations, call_intents):
                connection.execute(sa.delete(table).where(table.c.session_id == session_id))
            return decision.calls

        removed = await database.transact(remove)
        removed_sessions += removed > 0
        calls += removed
        show(done)
    with acting_for(EVERY_TENANT):  # tenants share parts
        return PruneResult(removed_sessions, calls, await database.transact(_remove_parts) if removed_sessions else 0)


def _remove_parts(connection: sa.Connection) -> int:
    """Removes the large parts without references; returns their number."""
    used: set[bytes] = set()
    for row in connection.execute(sa.select(call_intents.c.part_hashes)):
        used.update(split_hashes(row[0]))
    spared = database_clock(connection) - PART_SPARED_S
    unused = [row[0] for row in connection.execute(sa.select(parts.c.hash)) if row[0] not in used]
    removed = 0
    for start in range(0, len(unused), PAGE):
        some = parts.c.hash.in_(unused[start : start + PAGE])
        removed += connection.execute(sa.delete(parts).where(some, parts.c.seen_at < spared)).rowcount
    return removed
