"""Checks a whole log: checksums, content hashes, references, deltas and alignment.

It repairs nothing. If a row cannot be decoded, the rest of its session is not checked, but the other sessions are. It
reads one session at a time, so memory use is constant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy as sa

from rolltap.calllog.codec import part_hash, read_completion, read_intent, read_session, unpack_bytes
from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallCompletion, CallIntent, CallRow
from rolltap.calllog.schema import call_completions, call_intents, deliveries, parts, sessions
from rolltap.calllog.sessions import StoredCalls, assemble, fetch_calls
from rolltap.errors import AlignmentError, RecordCorrupt
from rolltap.tenants import EVERY_TENANT, acting_for

PAGE = 200
KEPT = 1000
"""Maximum number of problems that are listed. Further ones are only counted."""


@dataclass(slots=True)
class VerifyReport:
    """The number of checked items, and the problems."""

    sessions: int = 0
    calls: int = 0
    tokens: int = 0
    parts: int = 0
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0

    def add(self, problems: list[str]) -> None:
        self.problem_count += len(problems)
        self.problems += problems[: max(0, KEPT - len(self.problems))]


async def verify(database: Database, show: Callable[[int, int], None] = lambda done, total: None) -> VerifyReport:
    """Checks the log of all tenants. `show` gets the number of checked calls and parts, and of all."""
    with acting_for(EVERY_TENANT):
        return await _verify(database, show)


async def _verify(database: Database, show: Callable[[int, int], None]) -> VerifyReport:
    report = VerifyReport()
    total = await database.query(lambda connection: _count(connection, call_intents) + _count(connection, parts))
    async for page in _pages(database, sa.select(parts), parts.c.hash, b""):
        report.add(
            await asyncio.to_thread(lambda page=page: [text for row in page for text in part_problems(row[0], row[2])])
        )
        report.parts += len(page)
        show(report.parts, total)
    async for page in _pages(database, sa.select(sessions), sessions.c.id, ""):
        for row in page:
            report.add(await _verify_session(database, row, report))
            report.sessions += 1
            show(report.parts + report.calls, total)
    report.add(await database.query(lambda connection: list(_strays(connection))))
    return report


async def _verify_session(database: Database, row: sa.Row[Any], report: VerifyReport) -> list[str]:
    session_id = row[0]
    try:
        read_session(tuple(row))
        stored = await database.query(lambda connection: fetch_calls(connection, session_id, ()))
    except (RecordCorrupt, ValueError) as error:
        return [f"session {session_id}: {error}"]
    problems, calls = await asyncio.to_thread(check_calls, stored)
    report.calls += len(stored.intents)
    report.tokens += sum(len(call.intent.new_ids) + len(call.call().output_ids) for call in calls)
    return problems


def check_calls(stored: StoredCalls) -> tuple[list[str], list[CallRow]]:
    """The problems in a session's rows; and its calls, if there are no problems."""
    problems: list[str] = []
    intents: list[CallIntent] = []
    completions: dict[str, CallCompletion] = {}
    for row in stored.intents:
        try:
            intents.append(read_intent(row, stored.parts))
        except (RecordCorrupt, ValueError) as error:
            problems.append(_named(f"call {row[0]}", error))
    for call_id, row in stored.completions.items():
        try:
            completions[call_id] = read_completion(row)
        except (RecordCorrupt, ValueError) as error:
            problems.append(_named(f"completion of call {call_id}", error))
    if problems:
        return problems, []
    try:
        calls = assemble(intents, completions, stored)
    except RecordCorrupt as error:
        return [str(error)], []
    items: dict[str | None, int] = {None: 0}
    for call in calls:
        problems += _call_problems(call, items)
    return problems, [] if problems else calls


def _call_problems(call: CallRow, items: dict[str | None, int]) -> Iterator[str]:
    """The problems of one call. `items` has the number of request items by call id, for the calls before it."""
    intent, done = call.intent, call.completion
    shared, before = intent.request.items_shared, items.get(intent.parent_id, 0)  # none of an origin's call
    if shared > before:
        yield f"call {intent.id}: shares {shared} items, but its parent has {before}"
    items[intent.id] = shared + len(intent.request.items)
    try:
        call.call()
    except AlignmentError as error:
        yield str(error)
    if done is not None and done.flaw is None and not np.isfinite(done.logprobs).all():
        yield f"call {intent.id}: has log-probs that are not finite, but no flaw"


def part_problems(digest: bytes, data: bytes) -> Iterator[str]:
    """The problems of a large request part."""
    try:
        if part_hash(unpack_bytes(data)) != digest:
            yield f"request part {digest.hex()}: its content does not match its hash"
    except RecordCorrupt as error:
        yield f"request part {digest.hex()}: {error}"


def _strays(connection: sa.Connection) -> Iterator[str]:
    """The rows whose session or call is missing."""
    no_call, session_id = "{} {}: there is no such call", call_intents.c.session_id
    owners = (
        (call_intents, session_id, sessions.c.id, "{} {}: belongs to a session that is not in the log"),
        (call_completions, call_completions.c.call_id, call_intents.c.id, no_call),
        (deliveries, deliveries.c.call_id, call_intents.c.id, no_call),
    )
    for table, key, owner, words in owners:
        own_key = next(iter(table.primary_key))
        query = sa.select(own_key).outerjoin(owner.table, owner == key).where(owner.is_(None)).order_by(own_key)
        for row in connection.execute(query):
            yield words.format(table.name, row[0])
    yield from origin_problems(connection)


def origin_problems(connection: sa.Connection, session_id: str | None = None) -> list[str]:
    """The forks with calls, or this one of them, whose origin is not in the log: in its session, with this call."""
    columns, origin = sessions.c, call_intents.alias()
    forked_after = sa.exists().where(origin.c.id == columns.origin_call, origin.c.session_id == columns.origin_session)
    has_calls = sa.exists().where(call_intents.c.session_id == columns.id)
    forks = sa.select(columns.id, columns.origin_session, columns.origin_call).where(columns.origin_call.is_not(None))
    forks = forks.where(has_calls, ~forked_after).order_by(columns.id)
    if session_id is not None:
        forks = forks.where(columns.id == session_id)
    text = "session {}: was forked from session {} after call {}, which is not in the log"
    return [text.format(*row) for row in connection.execute(forks)]


def _named(what: str, error: Exception) -> str:
    text = str(error)
    return text if what in text else f"{what}: {text}"


def _count(connection: sa.Connection, table: sa.Table) -> int:
    return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


async def _pages(database: Database, query: sa.Select, key: sa.Column, first: str | bytes):
    after = first
    while True:
        some = query.where(key > after).order_by(key).limit(PAGE)
        page = await database.query(lambda connection, some=some: connection.execute(some).all())
        if not page:
            return
        yield page
        after = page[-1][0]
