"""Retention: removes the calls of sessions that nobody needs any more. `rolltap log prune`.

A session may go when it ended before a given time and

* it belongs to a rollout whose group was acknowledged by its trainer before that time, and is leased by nobody; or
* its group will not be trained (stale, dead or dropped), or it has no group at all, and an archive of
  `rolltap log export` holds exactly its calls.

Anything else is kept, with the reason. The session's own row stays (its key is still refused as a closed one), and a
row of `prunings` says that its calls are gone. Large request parts that no call refers to any more go last; parts that
a writer relied on a short while ago are spared, since it may be about to refer to them again. What trainers said of the
calls goes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rolltap.calllog.archive import calls_digest, read_archive
from rolltap.calllog.database import Database, database_clock
from rolltap.calllog.insert import Insert
from rolltap.calllog.records import split_hashes
from rolltap.calllog.schema import annotations, call_completions, call_intents, deliveries, parts, prunings, sessions
from rolltap.tenants import EVERY_TENANT, acting_for

PAGE = 200
PART_SPARED_S = 86_400.0
"""Unused parts that were seen within this time stay; a writer trusts its memory of a part for an hour."""


class Claim(StrEnum):
    """What the ledger says of a session's group."""

    WAITING = "waiting"  # open, complete or leased: it is still to be trained
    ACKNOWLEDGED = "acknowledged"
    REPLAYED = "replayed"  # acknowledged, and leased again
    ABANDONED = "abandoned"  # stale, dead or dropped


Claims = Callable[[sa.Connection, Sequence[str]], Mapping[str, tuple[Claim, float | None]]]
"""Of sessions by id, the claims of those that belong to a group, and when a group was acknowledged."""


class Reason(StrEnum):
    """Why a session's calls go or stay. A closed vocabulary."""

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


GOING = (Reason.ACKNOWLEDGED, Reason.EXPORTED)


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """What becomes of a session's calls."""

    session_id: str
    calls: int
    reason: Reason

    @property
    def goes(self) -> bool:
        return self.reason in GOING


def exported_in(archives: Iterable[Path]) -> dict[str, bytes]:
    """Which sessions the archives hold, and the digest of their calls. Reads the archives from end to end."""
    return {block.session[0]: block.digest() for path in archives for block in read_archive(path)}


async def judge(
    database: Database, *, before: float, exported: Mapping[str, bytes], claims: Claims
) -> list[PruneDecision]:
    """A verdict on every session that has calls, oldest first. Changes nothing."""
    verdicts: list[PruneDecision] = []
    after = ""
    now = await database.now()
    while True:
        query = sa.select(sessions).where(sessions.c.id > after).order_by(sessions.c.id).limit(PAGE)

        def page(connection: sa.Connection, query: sa.Select[Any] = query) -> tuple[str, list[PruneDecision]]:
            rows = connection.execute(query).all()
            claimed = claims(connection, [row.id for row in rows])
            page_verdicts = (_verdict(connection, row, claimed.get(row.id), exported, (before, now)) for row in rows)
            return rows[-1].id if rows else "", [verdict for verdict in page_verdicts if verdict is not None]

        after, page_verdicts = await database.query(page)
        if not after:
            return verdicts
        verdicts += page_verdicts


def _verdict(
    connection: sa.Connection,
    session: sa.Row[Any],
    claim: tuple[Claim, float | None] | None,
    exported: Mapping[str, bytes],
    times: tuple[float, float],
) -> PruneDecision | None:
    """None for a session without calls."""
    calls, unfinished = _counts(connection, session.id)
    if not calls:
        return None
    reason = _standing(session, claim, unfinished, *times)
    if reason is None:
        digest = exported.get(session.id)
        if digest is None:
            reason = Reason.NOT_EXPORTED
        else:
            reason = Reason.EXPORTED if digest == _digest(connection, session.id) else Reason.CHANGED
    return PruneDecision(session.id, calls, reason)


def _standing(
    session: sa.Row[Any], claim: tuple[Claim, float | None] | None, unfinished: int, before: float, now: float
) -> Reason | None:
    """The verdict where it does not hang on exports."""
    ended = session.closed_at if session.closed_at is not None else session.expires_at
    if session.closed_at is None and session.expires_at > now:
        return Reason.OPEN
    if unfinished:
        return Reason.UNDER_WAY
    if ended > before:
        return Reason.RECENT
    if claim is None or claim[0] is Claim.ABANDONED:
        return None
    if claim[0] is Claim.ACKNOWLEDGED:
        acknowledged_at = claim[1]
        late = acknowledged_at is None or acknowledged_at > before
        return Reason.ACKNOWLEDGED_RECENTLY if late else Reason.ACKNOWLEDGED
    return Reason.REPLAYED if claim[0] is Claim.REPLAYED else Reason.WAITING


def _counts(connection: sa.Connection, session_id: str) -> tuple[int, int]:
    """How many calls a session has, and how many of them without completion."""
    columns = sa.func.count(), sa.func.count(call_completions.c.call_id)
    joined = call_intents.outerjoin(call_completions, call_completions.c.call_id == call_intents.c.id)
    query = sa.select(*columns).select_from(joined).where(call_intents.c.session_id == session_id)
    calls, completed = connection.execute(query).one()
    return calls, calls - completed


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
class Pruned:
    sessions: int
    calls: int
    parts: int


async def prune(
    database: Database,
    *,
    before: float,
    exported: Mapping[str, bytes],
    claims: Claims,
    show: Callable[[int], None] = lambda done: None,
) -> Pruned:
    """Removes what `judge` lets go, a session a transaction, in which the verdict is made again."""
    verdicts = [
        verdict for verdict in await judge(database, before=before, exported=exported, claims=claims) if verdict.goes
    ]
    record = Insert(prunings, database.dialect, replace="true")
    removed_sessions = calls = 0
    for done, verdict in enumerate(verdicts, 1):

        def remove(connection: sa.Connection, session_id: str = verdict.session_id) -> int:
            locked = sa.select(sessions).where(sessions.c.id == session_id).with_for_update()
            session = connection.execute(locked).one()
            claim = claims(connection, [session_id]).get(session_id)
            again = _verdict(connection, session, claim, exported, (before, before))
            if again is None or not again.goes:
                return 0
            now = database_clock(connection)
            record.run(connection, [(session_id, now, again.calls, again.reason.value)])
            _remove(connection, session_id)
            return again.calls

        removed = await database.transact(remove)
        removed_sessions += removed > 0
        calls += removed
        show(done)
    with acting_for(EVERY_TENANT):  # tenants share parts
        return Pruned(removed_sessions, calls, await database.transact(_remove_parts) if removed_sessions else 0)


def _remove(connection: sa.Connection, session_id: str) -> None:
    own = sa.select(call_intents.c.id).where(call_intents.c.session_id == session_id)
    for table in (deliveries, call_completions):
        connection.execute(sa.delete(table).where(table.c.call_id.in_(own)))
    for table in (annotations, call_intents):
        connection.execute(sa.delete(table).where(table.c.session_id == session_id))


def _remove_parts(connection: sa.Connection) -> int:
    """Removes the large parts that no call refers to; returns how many."""
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
