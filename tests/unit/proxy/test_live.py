"""Sessions that a proxy has not seen come from the log, each by itself."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from rolltap.calllog.facts import CallRow
from rolltap.errors import SessionClosed, StoreUnavailable, Unauthenticated
from rolltap.ids import new_id
from rolltap.proxy.continuation.call_node import CallNode, Lineage
from rolltap.proxy.continuation.canonical import DIGEST_BYTES
from rolltap.proxy.sessions.live_sessions import TRUST_S, LiveSession, SessionCache, key_hash
from rolltap.types import Session

from ...memory_log import MemoryCallLog


class SlowLog(MemoryCallLog):
    """A memory log whose `rows` wait for `gate`. `reading` counts the reads that have begun, by session."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.reading: Counter[str] = Counter()
        self.failures = 0

    async def rows(self, session_id: str, *, known: Collection[str] = ()) -> Sequence[CallRow]:
        self.reading[session_id] += 1
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("away")
        return await super().rows(session_id, known=known)


async def opened(log: MemoryCallLog, key: str) -> Session:
    now = time.time()
    session = Session(new_id(), "tiny", key_hash(key), now, now + 3600)
    await log.open_session(session)
    return session


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_sessions_are_loaded_side_by_side() -> None:
    log = SlowLog()
    one, two = await opened(log, "one"), await opened(log, "two")
    live = SessionCache(log)
    entering = [asyncio.create_task(live.enter(key, None)) for key in ("one", "two")]
    await settle()
    assert log.reading == {one.id: 1, two.id: 1}
    log.gate.set()
    assert [entered.session for entered in await asyncio.gather(*entering)] == [one, two]


async def test_the_first_calls_of_a_session_load_it_once() -> None:
    log = SlowLog()
    session = await opened(log, "key")
    live = SessionCache(log)
    entering = [asyncio.create_task(live.enter("key", None)) for _ in range(3)]
    await settle()
    log.gate.set()
    first, *others = await asyncio.gather(*entering)
    assert all(other is first for other in others)
    assert log.reading == {session.id: 1}


async def test_a_call_that_is_given_up_or_fails_while_it_loads_leaves_that_to_the_next() -> None:
    log = SlowLog()
    session = await opened(log, "key")
    live = SessionCache(log)
    given_up, failing, waiting = (asyncio.create_task(live.enter("key", None)) for _ in range(3))
    await settle()
    given_up.cancel()
    log.failures = 1
    log.gate.set()
    results = await asyncio.gather(given_up, failing, waiting, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["CancelledError", "StoreUnavailable", "LiveSession"]
    assert log.reading == {session.id: 3}


async def test_the_longest_unused_sessions_are_let_go_first() -> None:
    log = SlowLog()
    log.gate.set()
    one, two, three = [await opened(log, key) for key in ("one", "two", "three")]
    live = SessionCache(log, capacity=2)
    for session in (one, two, one, three, one):
        await live.adopt(session)
    assert log.reading == {one.id: 1, two.id: 1, three.id: 1}


async def test_sessions_with_large_forests_are_let_go_first_unless_they_are_in_use() -> None:
    log = SlowLog()
    log.gate.set()
    one, two, three = [await opened(log, key) for key in ("one", "two", "three")]
    live = SessionCache(log, single_process=True, forest_bytes=1_000_000)
    for key in ("one", "two", "three"):
        grow(await live.enter(key, None), ids=100_000)  # 0.4 MB each, which counts from the next call on
    assert log.reading == {one.id: 1, two.id: 1, three.id: 1}
    with (await live.enter("one", None)).slot(1):
        for key in ("two", "three"):  # there is room for two: two goes, as one is in use
            await live.enter(key, None)
    await live.enter("one", None)
    await live.enter("three", None)
    assert log.reading == {one.id: 1, two.id: 1, three.id: 1}
    await live.enter("two", None)
    assert log.reading == {one.id: 1, two.id: 2, three.id: 1}


def grow(session: LiveSession, ids: int) -> None:
    lineage = Lineage(0, b"l" * DIGEST_BYTES, b"tools", b"system")
    session.forest.add(CallNode(new_id(), None, lineage, np.zeros(ids, np.int32)))


class CountingLog(MemoryCallLog):
    """Counts the look-ups by key; `gate` holds up their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_up = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def session_by_key(self, key_hash: str) -> Session | None:
        self.looked_up += 1
        session = await super().session_by_key(key_hash)
        await self.gate.wait()
        return session

    async def close_through(self, live: SessionCache, session: Session) -> None:
        await self.close_session(session.id, time.time())
        live.forget(session)


async def test_a_proxy_alone_on_its_store_looks_a_session_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CountingLog()
    session = await opened(log, "key")
    for single_process, look_ups in ((True, 1), (False, 3)):
        log.looked_up = 0
        live = SessionCache(log, single_process=single_process)
        for later in (0.0, TRUST_S + 0.1, 2 * (TRUST_S + 0.1)):
            monkeypatch.setattr(
                "rolltap.proxy.sessions.live_sessions.time.monotonic", lambda later=later: 1000.0 + later
            )
            assert (await live.enter("key", None)).session == session
        assert log.looked_up == look_ups


async def test_a_proxy_alone_on_its_store_refuses_a_session_that_it_closed() -> None:
    log = CountingLog()
    session = await opened(log, "key")
    live = SessionCache(log, single_process=True)
    await live.enter("key", None)
    await log.close_through(live, session)
    with pytest.raises(SessionClosed):
        await live.enter("key", None)


async def test_a_session_closed_here_is_refused_also_while_the_store_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CountingLog()
    session = await opened(log, "key")
    live = SessionCache(log, single_process=True)
    await live.enter("key", None)
    await log.close_through(live, session)
    monkeypatch.setattr("rolltap.proxy.sessions.live_sessions.ANSWERS_WITHIN_S", 0.02)
    log.gate.clear()
    for _ in range(2):
        with pytest.raises(SessionClosed):
            await live.enter("key", None)


@pytest.mark.parametrize("single_process", [True, False])
async def test_a_closed_sessions_forest_is_let_go_when_its_last_call_ends(single_process: bool) -> None:
    log = CountingLog()
    session = await opened(log, "key")
    live = SessionCache(log, single_process=single_process)
    in_use: list[LiveSession] = [await live.enter("key", None)]
    forest = weakref.ref(in_use[0])
    await log.close_through(live, session)
    assert in_use[0].session.closed_at is not None  # a call under way keeps it
    in_use.clear()
    assert forest() is None


async def test_what_is_cached_for_a_session_is_released_once_when_it_ends() -> None:
    log, released_sessions = CountingLog(), []
    one, two = await opened(log, "one"), await opened(log, "two")
    live = SessionCache(log, single_process=True, release=released_sessions.append)
    await live.enter("one", None)
    await live.adopt(two)
    await log.close_through(live, one)
    assert [(session.session.id, session.hashed_key) for session in released_sessions] == [(one.id, hash("one"))]
    released_sessions.clear()
    await log.close_through(live, one)  # its forest is not loaded for that
    with pytest.raises(SessionClosed):
        await live.enter("one", None)
    with pytest.raises(Unauthenticated, match="does not belong to session 'another'"):
        await live.enter("one", "another")
    assert released_sessions == []


async def test_a_closed_sessions_forest_is_not_loaded_to_refuse_its_key() -> None:
    log = SlowLog()
    log.gate.set()
    session = await opened(log, "key")
    await log.close_session(session.id, time.time())
    live = SessionCache(log)
    for _ in range(2):
        with pytest.raises(SessionClosed):
            await live.enter("key", None)
    assert log.reading == {}


async def test_a_proxy_alone_has_one_forest_of_a_session_whoever_holds_it() -> None:
    log = CountingLog()
    one, two = await opened(log, "one"), await opened(log, "two")
    live = SessionCache(log, single_process=True, capacity=1)
    held = await live.enter("one", None)  # before its call is counted in
    await live.adopt(two)
    assert await live.enter("one", None) is held
    await live.adopt(two)
    assert await live.adopt(one) is held


async def test_a_session_that_is_closed_while_it_is_looked_up_is_looked_up_again() -> None:
    log = CountingLog()
    session = await opened(log, "key")
    live = SessionCache(log, single_process=True)
    log.gate.clear()
    entering = asyncio.create_task(live.enter("key", None))
    await settle()
    await log.close_through(live, session)
    log.gate.set()
    await entering  # it was open when it was read
    with pytest.raises(SessionClosed):
        await live.enter("key", None)


async def test_a_session_in_use_does_not_wait_for_a_slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CountingLog()
    session = await opened(log, "key")
    live = SessionCache(log)
    entered = await live.enter("key", None)
    monkeypatch.setattr("rolltap.proxy.sessions.live_sessions.ANSWERS_WITHIN_S", 0.02)
    log.gate.clear()
    entered.trusted_until = 0.0
    async with asyncio.timeout(20):
        assert (await live.enter("key", None)).session == session
        slow = SlowLog()
        await slow.open_session(session)

        async def never(_: bool) -> bool:
            return False

        with pytest.raises(StoreUnavailable):
            await SessionCache(slow).read_until(entered, never, time.monotonic(), 0.02)


async def test_a_session_expires_by_the_stores_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CountingLog()
    session = await opened(log, "key")
    by_store = session.created_at
    live = SessionCache(log, clock=lambda: by_store)
    monkeypatch.setattr("rolltap.proxy.sessions.live_sessions.time.time", lambda: session.expires_at + 3600)
    assert (await live.enter("key", None)).session == session
    by_store = session.expires_at
    with pytest.raises(SessionClosed, match="has expired"):
        await live.enter("key", None)
