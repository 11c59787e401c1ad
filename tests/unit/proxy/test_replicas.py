"""Two proxies share a log, and a session's calls reach now one, now the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rolltap.errors import StoreUnavailable
from rolltap.ledger.base import PolicyState
from rolltap.types import Flaw
from tests.unit.proxy.conftest import Plane, ToldEngine, serve

USER = {"role": "user", "content": "list the files"}
MORE = {"role": "user", "content": "and now?"}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def other(plane: Plane, tokenizer: Any) -> Plane:
    """A proxy beside `plane`, on the same log."""
    return serve(plane.log, ToldEngine(tokenizer), plane.session, plane.limits)


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
