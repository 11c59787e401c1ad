"""Two proxies share a log, and a session's calls reach now one, now the other."""

from __future__ import annotations

import asyncio
import json
import time
from random import Random
from typing import Any

import pytest

from rolltap.contract.trainer import PolicyState
from rolltap.errors import StoreUnavailable
from rolltap.protocols.handles import Handles
from rolltap.proxy.sessions.live_sessions import CLOCKS_OFF_S
from rolltap.settings import LimitSettings
from rolltap.types import BreakReason, Flaw
from tests.unit.proxy.conftest import SECRET, Plane, ToldEngine, serve

USER = {"role": "user", "content": "list the files"}
MORE = {"role": "user", "content": "and now?"}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def other(plane: Plane, tokenizer: Any) -> Plane:
    """A proxy beside `plane`, on the same log."""
    return serve(plane.log, ToldEngine(tokenizer), plane.session, plane.limits)


def chat_body(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": list(messages)}


def message(answer: Any) -> dict[str, Any]:
    return answer.json()["choices"][0]["message"]


async def test_a_call_that_was_in_flight_elsewhere_is_continued_when_it_has_ended(plane: Plane, other: Plane) -> None:
    plane.engine.hold = asyncio.Event()
    first, _, task = plane.client.start("/v1/chat/completions", {"model": "tiny", "messages": [USER]})
    while not plane.engine.seen:  # noqa: ASYNC110  the engine's log is the event
        await asyncio.sleep(0)
    await other.client.chat({"role": "user", "content": "a side matter"})
    plane.engine.hold.set()
    await task
    await other.client.chat(USER, message(first), MORE)
    one, _, two = await plane.rows()
    assert two.intent.break_ is None
    assert two.intent.parent_id == one.intent.id


async def test_a_first_call_that_went_elsewhere_is_continued(plane: Plane, other: Plane) -> None:
    await other.client.post("/v1/models", b"", method="GET")
    first = await plane.client.chat(USER)
    await other.client.chat(USER, message(first), MORE)
    one, two = await plane.rows()
    assert two.intent.parent_id == one.intent.id
    assert two.intent.shared == len(one.prompt_ids) + len(one.completion.output_ids)


async def test_a_reply_of_another_proxy_is_told_from_one_that_reads_the_same(plane: Plane, other: Plane) -> None:
    make = "<tool_call>\n{}\n</tool_call><|im_end|>".format
    other.engine.replies = [make('{"name": "bash", "arguments": {}}'), "ok<|im_end|>"]
    plane.engine.replies = [make('{"name":"bash","arguments":{}}')]
    await other.client.chat(USER, tools=TOOLS)
    mine = message(await plane.client.chat(USER, tools=TOOLS))
    result = {"role": "tool", "tool_call_id": mine["tool_calls"][0]["id"], "content": "a.txt"}
    await other.client.chat(USER, mine, result, tools=TOOLS)
    _, two, three = await plane.rows()
    assert three.intent.parent_id == two.intent.id


class Away:
    """The store of one proxy, which can't read while it is `away`."""

    def __init__(self, log: Any) -> None:
        self._rows, self.away = log.rows, False

    async def rows(self, *args: Any, **options: Any) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return await self._rows(*args, **options)


@pytest.fixture
def store(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Away:
    store = Away(plane.log)
    monkeypatch.setattr(plane.log, "rows", store.rows)
    return store


async def test_a_continuation_waits_for_a_store_that_is_away_for_a_while(
    plane: Plane, other: Plane, store: Away
) -> None:
    await other.client.chat({"role": "user", "content": "a side matter"})
    first = await plane.client.chat(USER)
    store.away = True
    answer, _, task = other.client.start("/v1/chat/completions", chat_body(USER, message(first), MORE))
    await asyncio.sleep(0.3)
    assert not answer.status
    store.away = False
    await task
    one, two = [row for row in await plane.rows() if row.intent.id != (await plane.rows())[0].intent.id]
    assert (two.intent.parent_id, two.intent.break_) == (one.intent.id, None)


async def test_what_is_planned_without_the_store_does_not_blame_the_harness(
    plane: Plane, tokenizer: Any, store: Away, caplog: pytest.LogCaptureFixture
) -> None:
    other = serve(plane.log, ToldEngine(tokenizer), plane.session, LimitSettings(store_wait_s=0.05))
    await other.client.chat({"role": "user", "content": "a side matter"})
    first = await plane.client.chat(USER)
    store.away = True
    answer = await other.client.chat(USER, message(first), MORE)
    assert answer.status == 200
    store.away = False
    assert (await plane.rows())[-1].intent.break_.reason is BreakReason.PARENT_NOT_READ
    assert "may continue a call of another process, and goes on without it" in caplog.text


async def test_a_request_that_names_a_call_of_another_proxy_is_refused_before_its_engine_is_asked(
    plane: Plane, tokenizer: Any, store: Away
) -> None:
    other = serve(plane.log, ToldEngine(tokenizer), plane.session, LimitSettings(store_wait_s=0.05))
    plane.engine.replies = ['<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call><|im_end|>']
    await other.client.chat({"role": "user", "content": "a side matter"})
    mine = message(await plane.client.chat(USER, tools=TOOLS))
    result = {"role": "tool", "tool_call_id": mine["tool_calls"][0]["id"], "content": "a.txt"}
    store.away, asked = True, len(other.engine.seen)
    answer = await other.client.chat(USER, mine, result, tools=TOOLS)
    assert (answer.status, "retry-after" in answer.headers, len(other.engine.seen)) == (503, True, asked)
    store.away = False
    assert (await other.client.chat(USER, mine, result, tools=TOOLS)).status == 200
    assert (await plane.rows())[-1].intent.break_ is None


async def test_a_first_call_does_not_wait_for_the_store(plane: Plane, tokenizer: Any, store: Away) -> None:
    other = serve(plane.log, ToldEngine(tokenizer), plane.session, LimitSettings(store_wait_s=0.05))
    await other.client.chat({"role": "user", "content": "a side matter"})
    store.away = True
    assert (await other.client.chat(USER)).status == 200
    store.away = False
    assert (await plane.rows())[-1].intent.break_.reason is BreakReason.NEW_CONVERSATION


class Versions:
    """The ledger's version of the policy: `served`, None while the store is away. `read` counts the readings."""

    def __init__(self) -> None:
        self.served: int | None = 0
        self.read = 0

    async def __call__(self) -> list[PolicyState]:
        self.read += 1
        await asyncio.sleep(0)
        if self.served is None:
            raise StoreUnavailable("away")
        return [PolicyState("tiny", self.served, "")]


async def versions_of(plane: Plane) -> list[Any]:
    calls = [row.call() for row in await plane.rows()]
    return [call.flaw or [span.version for span in call.versions] for call in calls]


async def test_weights_that_another_proxy_pushed_are_told_by_the_ledger(plane: Plane, tokenizer: Any) -> None:
    ledger = Versions()
    engine = ToldEngine(tokenizer, version=None)
    proxy = serve(plane.log, engine, plane.session, plane.limits, ledger)
    await proxy.client.chat(USER)
    ledger.served = 1
    await proxy.client.chat(USER)  # nobody knows which: the push came before the call or within it
    await proxy.client.chat(USER)
    ledger.served = None
    await proxy.client.chat(USER)
    assert await versions_of(plane) == [[0], Flaw.VERSION_UNKNOWN, [1], Flaw.VERSION_UNKNOWN]


async def test_one_reading_of_the_ledger_serves_the_calls_that_ended_before_it(plane: Plane, tokenizer: Any) -> None:
    ledger = Versions()
    proxy = serve(plane.log, ToldEngine(tokenizer, version=None), plane.session, plane.limits, ledger)
    answers = await asyncio.gather(*(proxy.client.chat(USER) for _ in range(4)))
    assert [answer.status for answer in answers] == [200] * 4
    assert await versions_of(plane) == [[0]] * 4
    assert ledger.read < 4


SPACINGS = ('{"name": "bash", "arguments": {}}', '{"name":"bash","arguments":{}}', '{"name": "bash",  "arguments": {}}')


@pytest.mark.parametrize("seed", range(3))
async def test_wherever_calls_go_each_continues_the_reply_that_its_client_echoes(
    plane: Plane, tokenizer: Any, seed: int
) -> None:
    """Conversations at once, turns sampled twice, replies that read the same in other tokens, three proxies."""
    draw = Random(seed)
    limits = LimitSettings(calls_at_once=16)
    proxies = [serve(plane.log, ToldEngine(tokenizer), plane.session, limits) for _ in range(3)]
    for proxy in proxies:
        proxy.engine.replies = [f"<tool_call>\n{draw.choice(SPACINGS)}\n</tool_call><|im_end|>" for _ in range(64)]

    async def conversation(name: str) -> None:
        history: list[dict[str, Any]] = [{"role": "user", "content": name}]
        for _ in range(4):
            asked = (draw.choice(proxies).client.chat(*history, tools=TOOLS) for _ in range(draw.choice((1, 2))))
            reply = draw.choice([message(await answer) for answer in list(asked)])
            history += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "a.txt"}]

    await asyncio.gather(*(conversation(name) for name in ("one", "two", "two")))
    rows = await plane.rows()
    assert {row.intent.break_.reason for row in rows if row.intent.break_} <= {BreakReason.NEW_CONVERSATION}
    by_id = {row.intent.id: row for row in rows}
    read = Handles(SECRET).read
    for row in rows:
        items = map(json.loads, (await plane.log.request(row.intent.id)).items)
        named = [read(item["tool_call_id"]) for item in items if item["role"] == "tool"]
        if named:
            assert row.intent.parent_id == named[-1]
            assert row.intent.shared == by_id[named[-1]].call().context_length


class CutOff:
    """A log in which the calls of a proxy are hidden from the others, which know that some may be: in its spool."""

    def __init__(self, log: Any) -> None:
        self._rows, self.hidden = log.rows, True

    async def rows(self, *args: Any, **options: Any) -> Any:
        rows = await self._rows(*args, **options)
        return [] if self.hidden else rows

    async def may_lack_facts(self, since: float) -> bool:
        return self.hidden


@pytest.fixture
def cut_off(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> CutOff:
    log = CutOff(plane.log)
    monkeypatch.setattr(plane.log, "rows", log.rows)
    monkeypatch.setattr(plane.log, "may_lack_facts", log.may_lack_facts)
    return log


async def test_a_call_in_the_spool_of_another_proxy_is_waited_for(plane: Plane, other: Plane, cut_off: CutOff) -> None:
    await other.client.chat({"role": "user", "content": "a side matter"})
    first = await plane.client.chat(USER)
    answer, _, task = other.client.start("/v1/chat/completions", chat_body(USER, message(first), MORE))
    await asyncio.sleep(0.3)
    assert not answer.status
    cut_off.hidden = False
    await task
    _, one, two = await plane.rows()
    assert (two.intent.parent_id, two.intent.break_) == (one.intent.id, None)


@pytest.mark.parametrize("knows_the_session", [True, False])
async def test_a_call_that_stays_in_a_spool_is_not_blamed_on_the_harness(
    plane: Plane, tokenizer: Any, cut_off: CutOff, knows_the_session: bool
) -> None:
    other = serve(plane.log, ToldEngine(tokenizer), plane.session, LimitSettings(store_wait_s=0.3))
    if knows_the_session:
        await other.client.chat({"role": "user", "content": "a side matter"})
    first = await plane.client.chat(USER)
    assert (await other.client.chat(USER, message(first), MORE)).status == 200
    cut_off.hidden = False
    assert (await plane.rows())[-1].intent.break_.reason is BreakReason.PARENT_NOT_READ


async def test_what_a_proxy_that_died_had_is_not_waited_for_and_not_blamed_on_the_harness(
    plane: Plane, other: Plane, cut_off: CutOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await plane.client.chat(USER)
    asked: list[float] = []

    async def vanished(since: float) -> list[str]:
        asked.append(since)
        return ["a proxy"]

    async def may_lack_facts(since: float) -> bool:
        return False

    monkeypatch.setattr(plane.log, "vanished", vanished)
    monkeypatch.setattr(plane.log, "may_lack_facts", may_lack_facts)
    async with asyncio.timeout(5):
        assert (await other.client.chat(USER, message(first), MORE)).status == 200
        cut_off.hidden = False
        assert (await other.client.chat(USER, message(first), MORE)).status == 200
    _, lost, found = await plane.rows()
    assert lost.intent.break_.reason is BreakReason.PARENT_NOT_READ
    assert found.intent.break_ is None, "what is in the store is read as ever"
    assert asked == [plane.session.created_at - CLOCKS_OFF_S]


FEW_SHOT = ({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"})


async def test_one_heartbeat_lets_all_go_on_that_came_before_it(
    plane: Plane, other: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's calls are planned one after another: each is not to wait for a heartbeat of its own."""
    heard_at = 0.0

    async def may_lack_facts(since: float) -> bool:
        return since > heard_at

    monkeypatch.setattr(plane.log, "may_lack_facts", may_lack_facts)
    calls = [other.client.start("/v1/chat/completions", chat_body(*FEW_SHOT, USER)) for _ in range(4)]
    await asyncio.sleep(0.3)
    assert not any(answer.status for answer, _, _ in calls)
    heard_at = time.monotonic()
    async with asyncio.timeout(5):
        await asyncio.gather(*(task for _, _, task in calls))
    assert [answer.status for answer, _, _ in calls] == [200] * 4


async def test_a_reply_that_is_named_and_in_the_spool_of_another_proxy_is_not_denied(
    plane: Plane, tokenizer: Any, cut_off: CutOff
) -> None:
    first = (await plane.client.post("/v1/responses", {"model": "tiny", "input": "hi"})).json()
    body = {"model": "tiny", "input": "and?", "previous_response_id": first["id"]}
    for wait_s, goes_on in ((0.3, False), (15, True)):
        other = serve(plane.log, ToldEngine(tokenizer), plane.session, LimitSettings(store_wait_s=wait_s))
        answer, _, task = other.client.start("/v1/responses", body)
        await asyncio.sleep(0.2)
        assert not answer.status
        cut_off.hidden = not goes_on
        await task
        assert answer.status == (200 if goes_on else 503)
    one, two = await plane.rows()
    assert (two.intent.parent_id, two.intent.break_) == (one.intent.id, None)
