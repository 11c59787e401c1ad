"""Notes that people, scripts and evaluators add to recorded sessions and calls. Append-only.

A score has a number, a label a text or None, a comment a text, a tag a text or None (None removes the tag). Of several
scores, labels or tags with the same name the last one counts; the earlier ones stay on record. A note belongs to a call
or to the whole session. It never changes a call, a reward or the training data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rolltap.calllog.codec import check_columns, left_out_if_unreadable
from rolltap.calllog.database import Database
from rolltap.calllog.schema import call_intents, notes, sessions
from rolltap.contract.admin import NewNote, Note
from rolltap.contract.tags import SET_BY_SERVER
from rolltap.decoding import convert
from rolltap.errors import ConfigError, InvalidRequest, NotFound, RecordCorrupt, StoreUnavailable
from rolltap.ids import new_id


async def append_note(database: Database, note: NewNote) -> Note:
    """Appends a note. Raises `NotFound` for an unknown session or call."""
    _check_tag(note)

    def work(connection: sa.Connection, now: float) -> Note:
        if note.call_id is not None:
            owner = sa.select(call_intents.c.session_id).where(call_intents.c.id == note.call_id)
        else:
            owner = sa.select(sessions.c.id).where(sessions.c.id == note.session_id)
        session_id = connection.scalar(owner)
        if session_id is None:
            what, id = ("call", note.call_id) if note.call_id is not None else ("session", note.session_id)
            raise NotFound(f"no {what} {id!r}", param=f"{what}_id")
        added = Note(
            new_id(), session_id, note.call_id, note.kind, note.name, note.value, author=note.author, created_at=now
        )
        connection.execute(sa.insert(notes).values(_row(added)))
        return added

    now = await database.now()
    return await database.transact(lambda connection: work(connection, now))


async def append_note_beside(database: Database, note: NewNote) -> Note:
    """Appends a note to a store that is open read-only, by opening it for writing briefly."""
    writer = Database(database.url.render_as_string(hide_password=False))
    try:
        await writer.start()
    except (ConfigError, StoreUnavailable) as error:
        raise ConfigError(
            f"cannot write to {writer.name} now ({error.message}); while a server uses it, add notes through it: "
            'rolltap.open("http://ADMIN-PLANE", key=...)'
        ) from error
    try:
        return await append_note(writer, note)
    finally:
        await writer.close()


def notes_of(connection: sa.Connection, session_ids: Sequence[str]) -> dict[str, list[Note]]:
    """The notes of the sessions and their calls, in order; none if the store has no table of notes yet."""
    by_session: dict[str, list[Note]] = {}
    if not session_ids or not sa.inspect(connection).has_table(notes.name):
        return by_session
    query = sa.select(notes).where(notes.c.session_id.in_(session_ids)).order_by(notes.c.id)
    for row in connection.execute(query):
        own = by_session.setdefault(row.session_id, [])
        with left_out_if_unreadable("note", row.id):
            check_columns(notes.columns, row)
            own.append(_note(row))
    return by_session


def check_note_row(row: Sequence[Any]) -> None:
    """Raises `ValueError` or `InvalidRequest` unless the API would take the row's note."""
    columns = dict(zip(notes.c.keys(), row, strict=True))
    of_call = columns["call_id"] is not None
    fields = {name: columns[name] for name in ("kind", "name", "author")}
    owner = {"call_id": columns["call_id"]} if of_call else {"session_id": columns["session_id"]}
    _check_tag(convert({**fields, **owner, "value": json.loads(columns["value"])}, NewNote))


def _check_tag(note: NewNote) -> None:
    if note.kind == "tag" and note.name in SET_BY_SERVER:
        raise InvalidRequest(f"name: the server sets the tag {note.name} itself", param="name")


def tags_after(tags: Mapping[str, str], newer: Iterable[Note]) -> dict[str, str]:
    """The session's tags after the changes by its notes. None changes a tag that the server sets: rules, a tenant."""
    changed = dict(tags)
    for note in newer:
        if note.kind != "tag" or note.name in SET_BY_SERVER:
            continue
        if isinstance(note.value, str):
            changed[note.name] = note.value
        else:
            changed.pop(note.name, None)
    return changed


def _row(note: Note) -> dict[str, Any]:
    return {
        "id": note.id,
        "session_id": note.session_id,
        "call_id": note.call_id,
        "kind": note.kind,
        "name": note.name,
        "value": json.dumps(note.value),
        "author": note.author,
        "created_at": note.created_at,
    }


def _note(row: Any) -> Note:
    value = json.loads(row.value)
    if not isinstance(value, float | int if row.kind == "score" else str | None):
        raise RecordCorrupt(f"no {row.kind} has such a value")
    return Note(
        id=row.id,
        session_id=row.session_id,
        call_id=row.call_id,
        kind=row.kind,
        name=row.name,
        value=value,
        author=row.author,
        created_at=row.created_at,
    )
