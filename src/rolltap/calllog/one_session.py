"""Reads one session without its requests, and a fingerprint that shows whether it has changed."""

from __future__ import annotations

import sqlalchemy as sa

from rolltap.calllog.base import CallRow
from rolltap.calllog.codec import unpack_bytes
from rolltap.calllog.outline import model_of
from rolltap.calllog.reading import StoredSessions, decode_rows, fetch_sessions
from rolltap.calllog.records import StoredRequest
from rolltap.calllog.schema import call_completions, call_intents, deliveries, sessions
from rolltap.decoding import msgpack_decoder
from rolltap.errors import NotFound
from rolltap.types import Session

Fingerprint = tuple[float | None, str | None, int, int, int]
"""Closing time, log check, and the counts of intents, completions and deliveries, which only grow."""


def fingerprint(connection: sa.Connection, session_id: str) -> Fingerprint:
    """The session's fingerprint. Raises `NotFound`."""
    known = connection.execute(
        sa.select(sessions.c.closed_at, sessions.c.log_check).where(sessions.c.id == session_id)
    ).first()
    if known is None:
        raise NotFound(f"no session {session_id!r}", param="session_id")
    joined = call_intents.outerjoin(call_completions, call_completions.c.call_id == call_intents.c.id)
    joined = joined.outerjoin(deliveries, deliveries.c.call_id == call_intents.c.id)
    counts = sa.select(
        sa.func.count(call_intents.c.id),
        sa.func.count(call_completions.c.call_id),
        sa.func.count(deliveries.c.call_id),
    ).select_from(joined)
    intents, ended, delivered = connection.execute(counts.where(call_intents.c.session_id == session_id)).one()
    return known.closed_at, known.log_check, intents, ended, delivered


def fetch_session(connection: sa.Connection, session_id: str) -> StoredSessions:
    return fetch_sessions(connection, [session_id])


def decode_session(stored: StoredSessions) -> tuple[Session, list[CallRow], dict[str, str]]:
    """The session, its calls in order, and the requested model by call id."""
    ((session, rows),) = decode_rows(stored).values()
    decoder = msgpack_decoder(StoredRequest)
    models = {row[0]: model_of(decoder.decode(unpack_bytes(row[-1])).head) for row in stored.calls.intents}
    return session, rows, models


def session_of_call(connection: sa.Connection, call_id: str) -> str:
    """The session id of a call. Raises `NotFound`."""
    session_id = connection.scalar(sa.select(call_intents.c.session_id).where(call_intents.c.id == call_id))
    if session_id is None:
        raise NotFound(f"no call {call_id!r}", param="call_id")
    return session_id
