"""Finds the changes in the log since a reader's last look, with a few index lookups.

Clocks of several proxies differ and a spool writes late. So every look covers the last `MARGIN_S` seconds again, and
`calls_by_session` finds what was still missed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from rolltap.calllog.reading import CHUNK
from rolltap.calllog.schema import call_completions, call_intents, notes, sessions
from rolltap.ids import first_id_at

MARGIN_S = 30.0


@dataclass(frozen=True, slots=True)
class ReaderPosition:
    """A reader's last look: its time, the count and greatest id of its sessions, its open calls."""

    at: float
    sessions: int
    last_session: str
    open_calls: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Changes:
    """Ids of new and of changed sessions. `missing`: the reader lacks some older sessions too.

    `calls` maps the ids of recent calls to their sessions; the reader may have some of them. `ended`: open calls that
    have ended.
    """

    new_sessions: Sequence[str]
    missing: bool
    changed_sessions: Sequence[str]
    calls: dict[str, str]
    ended: Sequence[str]


def changes_since(connection: sa.Connection, position: ReaderPosition) -> Changes:
    columns = call_intents.c
    count = connection.scalar(sa.select(sa.func.count()).select_from(sessions)) or 0
    newer = sa.select(sessions.c.id).where(sessions.c.id > position.last_session).order_by(sessions.c.id)
    new = [row[0] for row in connection.execute(newer)] if position.sessions else []
    recent = sa.select(columns.id, columns.session_id).where(columns.id >= first_id_at(position.at - MARGIN_S))
    closed = sa.select(sessions.c.id).where(sessions.c.closed_at >= position.at - MARGIN_S)
    changed = [row[0] for row in connection.execute(closed)]
    if sa.inspect(connection).has_table(notes.name):
        with_notes = sa.select(notes.c.session_id).where(notes.c.id >= first_id_at(position.at - MARGIN_S)).distinct()
        changed += [row[0] for row in connection.execute(with_notes)]
    return Changes(
        new_sessions=new,
        missing=count > position.sessions + len(new),
        changed_sessions=changed,
        calls={row[0]: row[1] for row in connection.execute(recent)} if position.sessions else {},
        ended=_ended(connection, list(position.open_calls)),
    )


def _ended(connection: sa.Connection, call_ids: Sequence[str]) -> list[str]:
    ended: list[str] = []
    for start in range(0, len(call_ids), CHUNK):
        some = call_completions.c.call_id.in_(call_ids[start : start + CHUNK])
        ended += [row[0] for row in connection.execute(sa.select(call_completions.c.call_id).where(some))]
    return ended


def session_ids(connection: sa.Connection) -> list[str]:
    """The ids of all sessions, the newest first."""
    return [row[0] for row in connection.execute(sa.select(sessions.c.id).order_by(sessions.c.id.desc()))]


def calls_by_session(connection: sa.Connection) -> dict[str, int]:
    """The number of calls by session, without sessions that have none."""
    column = call_intents.c.session_id
    return {row[0]: row[1] for row in connection.execute(sa.select(column, sa.func.count()).group_by(column))}
