"""Brings the index of sessions up to date with the record, a little at a time.

Nothing runs while nobody looks. A look finds what has changed since the last one (new sessions and calls, calls that
have ended, rewards and rollouts by the ledger's events, notes, closed sessions), marks it as stale, and makes the
newest summaries anew; what is left goes on in the background with pauses, so that a server keeps its calls quick. What
the clocks of several writers hid is found by a thorough look, which takes long over a large record, in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from rolltap.calllog.changes import Seen, calls_by_session, changes_since, session_ids
from rolltap.calllog.database import Database
from rolltap.calllog.notes import notes_of
from rolltap.calllog.outline import call_words, fetch_summarized
from rolltap.errors import StoreError
from rolltap.ledger.reading import ledger_changes_since, origins, tampered_since, tampering_counts
from rolltap.reading.index import SessionIndex
from rolltap.reading.summaries import summary_of

log = logging.getLogger("rolltap.reading")

LOOK_EVERY_S = 0.5
THOROUGH_EVERY_S = 60.0
SESSIONS_AT_ONCE = 100
TEXTS_AT_ONCE = 50
PAUSE = 1.0
"""Background work rests this many times as long as it works."""


class Indexer:
    """Keeps `index` up to date with `database`. One for a reader."""

    def __init__(self, index: SessionIndex, database: Database) -> None:
        self.index = index
        self._database = database
        self._working = asyncio.Lock()
        self._looked_at = self._thorough_at = float("-inf")
        self._events: frozenset[int] = frozenset()  # of the ledger, that were read last time
        self._rest: asyncio.Task[None] | None = None
        self._opened = self._texts_wanted = False

    async def refresh(self, budget_s: float = 0.25, *, texts: bool = False, now: bool = False) -> float:
        """Works for about `budget_s`, goes on in the background; the share of the record that the index holds.

        `texts`: the calls' words, too. `now`: all that is on record by now, also what is younger than half a second.
        """
        self._texts_wanted |= texts
        if now:
            self._looked_at = float("-inf")
        until = time.monotonic() + budget_s
        async with self._working:
            await self._look(thorough=now)
            more = await self._work()
            while more and time.monotonic() < until:
                more = await self._work()
        if (more or self._is_thorough_due()) and (self._rest is None or self._rest.done()):
            self._rest = asyncio.create_task(self._go_on())
        sessions, words = await asyncio.to_thread(self.index.shares)
        return min(sessions, words) if texts else sessions

    async def close(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            await asyncio.gather(self._rest, return_exceptions=True)

    async def _go_on(self) -> None:
        more = True
        while more:
            started = time.monotonic()
            try:
                if self._is_thorough_due():
                    stale = await self._look_thoroughly()
                    await asyncio.to_thread(self.index.mark, stale)
                async with self._working:
                    more = await self._work()
            except StoreError as error:
                log.warning("the index of sessions is behind: %s", error.message)
                return
            await asyncio.sleep(PAUSE * (time.monotonic() - started))

    def _is_thorough_due(self) -> bool:
        return time.monotonic() > self._thorough_at + THOROUGH_EVERY_S

    async def _look(self, *, thorough: bool) -> None:
        """Marks what has changed since the last look; `thorough`: by a thorough look, too, if one is due."""
        if time.monotonic() < self._looked_at + LOOK_EVERY_S:
            return
        if not self._opened:
            await asyncio.to_thread(self.index.open)
            self._opened = True
        meta = await asyncio.to_thread(self.index.meta)
        now = await self._database.now()
        looked, events_at = float(meta.get("looked_at", 0.0)), float(meta.get("events_at", 0.0))
        count, last = await asyncio.to_thread(self.index.newest)
        open_calls = await asyncio.to_thread(self.index.open_calls)
        seen = Seen(looked, count, last, list(open_calls))
        changes = await self._database.query(lambda connection: changes_since(connection, seen))
        in_ledger = await self._database.query(
            lambda connection: ledger_changes_since(connection, events_at, self._events)
        )
        stale = {*changes.new_sessions, *changes.changed_sessions}
        stale.update(open_calls[call_id] for call_id in changes.ended)
        new_calls = await asyncio.to_thread(self.index.unknown_calls, list(changes.calls))
        stale.update(changes.calls[call_id] for call_id in new_calls)
        stale |= await asyncio.to_thread(self.index.of_subjects, in_ledger.subjects)
        stale |= await self._database.query(lambda connection: tampered_since(connection, events_at))
        if changes.missing or (thorough and self._is_thorough_due()):
            stale |= await self._look_thoroughly()
        marks = {"looked_at": repr(now), "events_at": repr(in_ledger.at)}
        await asyncio.to_thread(lambda: self.index.mark(stale, **marks))
        self._events = in_ledger.seen
        self._looked_at = time.monotonic()

    async def _look_thoroughly(self) -> set[str]:
        """Sessions that the index lacks, or that have another number of calls than it says."""
        known = await asyncio.to_thread(self.index.call_counts)
        recorded = await self._database.query(calls_by_session)
        every = await self._database.query(session_ids)
        self._thorough_at = time.monotonic()
        return await asyncio.to_thread(lambda: {id for id in every if known.get(id, -1) != recorded.get(id, 0)})

    async def _work(self) -> bool:
        """Does one portion; whether there is more."""
        waiting = await asyncio.to_thread(self.index.waiting, SESSIONS_AT_ONCE)
        if waiting:
            await self._summarize(waiting)
            return True
        if not self._texts_wanted:
            return False
        unread = await asyncio.to_thread(self.index.unread, TEXTS_AT_ONCE)
        if unread:
            words = await self._database.query(lambda connection: call_words(connection, unread))
            await asyncio.to_thread(self.index.put_texts, unread, words)
        return bool(unread)

    async def _summarize(self, waiting: Sequence[str]) -> None:
        read = await self._database.query(lambda connection: fetch_summarized(connection, waiting))
        rollouts = [session.rollout_id for session, _ in read if session.rollout_id is not None]
        came_from = await self._database.query(lambda connection: origins(connection, rollouts))
        notes = await self._database.query(lambda connection: notes_of(connection, waiting))
        tampering = await self._database.query(lambda connection: tampering_counts(connection, waiting))
        summaries = [
            summary_of(
                session,
                calls,
                came_from.get(session.rollout_id or ""),
                notes.get(session.id, ()),
                tampering.get(session.id, 0),
            )
            for session, calls in read
        ]
        calls = {session.id: [(call.id, call.outcome is None) for call in outlines] for session, outlines in read}
        await asyncio.to_thread(self.index.put, waiting, summaries, calls)
