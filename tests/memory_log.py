"""A call log in memory, without durability: the contract suite runs over it as over the real stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rolltap.calllog.codec import part_hash
from rolltap.calllog.facts import (
    CallCompletion,
    CallIntent,
    CallRow,
    Delivery,
    LogCondition,
    RequestParts,
    aborted,
    extend_items,
    name_of,
    same_fact,
)
from rolltap.calllog.sessions import Delta, chain_rows, delta_of, in_order, rebuild_prompts
from rolltap.errors import NotFound, RecordCorrupt
from rolltap.types import UNCHECKED, Call, LogCheck, Origin, Session


class MemoryCallLog:
    """A `CallLog` whose facts exist as long as the object."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, str] = {}
        self._calls: dict[str, list[str]] = {}
        self._intents: dict[str, CallIntent] = {}
        self._completions: dict[str, CallCompletion] = {}
        self._presumed: set[str] = set()
        self._deliveries: dict[str, Delivery] = {}

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def condition(self) -> LogCondition:
        return LogCondition(store=True)

    async def open_session(self, session: Session) -> None:
        known = self._sessions.get(session.id)
        if self._by_key.setdefault(session.key_hash, session.id) != session.id:
            raise RecordCorrupt(f"{name_of(session)} has the same key as another session")
        opening = known and replace(known, closed_at=session.closed_at, log_check=session.log_check)
        if _is_new(self._sessions, session.id, session, opening):
            self._calls[session.id] = []

    async def claim_session(self, session: Session) -> Session:
        if session.key_hash not in self._by_key:
            await self.open_session(session)
        return self._sessions[self._by_key[session.key_hash]]

    async def close_session(self, session_id: str, at: float) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"there is no session {session_id}")
        if session.closed_at is None:
            self._sessions[session_id] = replace(session, closed_at=at)

    async def set_log_check(self, session_id: str, check: LogCheck) -> LogCheck:
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"there is no session {session_id}")
        if session.log_check == UNCHECKED:
            self._sessions[session_id] = replace(session, log_check=check)
        return self._sessions[session_id].log_check

    async def session(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    async def session_by_key(self, key_hash: str) -> Session | None:
        return self._sessions.get(self._by_key.get(key_hash, ""))

    async def session_of(self, call_id: str) -> Session | None:
        intent = self._intents.get(call_id)
        return self._sessions.get(intent.session_id) if intent is not None else None

    async def sessions(self, *, limit: int = 100, before: str | None = None) -> Sequence[Session]:
        ids = sorted((key for key in self._sessions if before is None or key < before), reverse=True)
        return [self._sessions[session_id] for session_id in ids[:limit]]

    async def all_sessions(self) -> AsyncIterator[Session]:
        for session_id in sorted(self._sessions):
            yield self._sessions[session_id]

    async def append_intent(self, intent: CallIntent) -> None:
        if _is_new(self._intents, intent.id, intent, self._intents.get(intent.id)):
            self._calls.setdefault(intent.session_id, []).append(intent.id)

    async def append_completion(self, completion: CallCompletion) -> None:
        call_id = completion.call_id
        if call_id in self._presumed:
            self._presumed.remove(call_id)
            del self._completions[call_id]
        _is_new(self._completions, call_id, completion, self._completions.get(call_id))

    def append_delivery(self, call_id: str, delivered: bool) -> asyncio.Future[None]:
        if delivered or call_id not in self._deliveries:
            self._deliveries[call_id] = Delivery(call_id, delivered)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written

    async def rows(self, session_id: str, *, known: Collection[str] = ()) -> Sequence[CallRow]:
        own = self._calls.get(session_id, ())
        origin = self._sessions[session_id].origin if session_id in self._sessions else None
        before = self._before(origin.call_id) if origin is not None else ()
        prompts = rebuild_prompts(map(self._delta, {*before, *own}))
        order = in_order({call_id: self._intents[call_id].parent_id for call_id in own})
        return [self._row(call_id, prompts) for call_id in order if call_id not in known]

    async def chain(self, origin: Origin) -> Sequence[CallRow]:
        before = self._before(origin.call_id)
        prompts = rebuild_prompts(map(self._delta, before))
        rows = {call_id: self._row(call_id, prompts) for call_id in before}
        return chain_rows(rows, origin, {key: session.rollout_id or key for key, session in self._sessions.items()})

    def _before(self, call_id: str | None) -> list[str]:
        """The call and those before it."""
        chain: list[str] = []
        while call_id in self._intents:
            chain.append(call_id)
            call_id = self._intents[call_id].parent_id
        return chain

    def _delta(self, call_id: str) -> Delta:
        return delta_of(self._intents[call_id], self._completions.get(call_id))

    async def calls(self, session_ids: Sequence[str]) -> Mapping[str, tuple[Session, Sequence[Call]]]:
        known = [key for key in session_ids if key in self._sessions]
        calls: dict[str, tuple[Session, Sequence[Call]]] = {}
        for key in known:
            session = self._sessions[key]
            rows = await self.rows(key)
            chain = await self.chain(session.origin) if session.origin is not None and rows else ()
            calls[key] = session, [row.call() for row in [*chain, *rows]]
        return calls

    def _row(self, call_id: str, prompts: dict[str, Any]) -> CallRow:
        delivery = self._deliveries.get(call_id)
        delivered = delivery.delivered if delivery else None
        return CallRow(self._intents[call_id], prompts[call_id], self._completions.get(call_id), delivered)

    async def request(self, call_id: str) -> RequestParts:
        ancestors: list[CallIntent] = []
        current: str | None = call_id
        while current is not None:
            if current not in self._intents:
                raise (RecordCorrupt if ancestors else NotFound)(f"there is no call {current}")
            ancestors.append(self._intents[current])
            current = ancestors[-1].parent_id if ancestors[-1].request.items_shared else None
        items: tuple[bytes, ...] = ()
        for intent in reversed(ancestors):
            items = extend_items(intent.id, items, intent.request)
        return replace(ancestors[0].request, items=items, items_shared=0, images=())

    async def images(self, digests: Collection[str]) -> Mapping[str, bytes]:
        images = {part_hash(image).hex(): image for one in self._intents.values() for image in one.request.images}
        return {digest: images[digest] for digest in digests if digest in images}

    async def may_lack_facts(self, since: float) -> bool:
        return False

    async def vanished(self, since: float) -> list[str]:
        return []

    async def abort_orphans(self, live: Sequence[str], *, at: float) -> int:
        orphans = [
            intent.id
            for intent in self._intents.values()
            if intent.id not in self._completions and intent.process not in live
        ]
        self._completions.update((call_id, aborted(call_id, at)) for call_id in orphans)
        self._presumed.update(orphans)
        return len(orphans)


def _is_new(facts: dict[str, Any], key: str, fact: Any, known: Any) -> bool:
    """Adds a fact. Returns False if it exists already; raises `RecordCorrupt` if the existing one differs."""
    if known is None:
        facts[key] = fact
        return True
    if not same_fact(known, fact):
        raise RecordCorrupt(f"{name_of(fact)} is already in the log with other values")
    return False
