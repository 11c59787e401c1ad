"""Streams whose parts are written inside the engine's read: slow clients, several readers, failures, silence, order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rolltap.errors import StoreUnavailable
from rolltap.proxy.call.http_exchange import BrokenReply
from rolltap.proxy.call.in_flight import WaitingReader
from rolltap.proxy.call.sources.chat import IntentInReply
from rolltap.types import Outcome
from tests.unit.proxy.conftest import Answer, text_sent, wait_for_text

USER = {"role": "user", "content": "list the files"}
BODY = {"model": "tiny", "messages": [USER], "stream": True}
PATH = "/v1/chat/completions"
RETRY = {"x-stainless-retry-count": "1"}
TEXT = "a long answer in several words"


def held(plane: Any, text: str = TEXT) -> None:
    """The engine stops before its last token."""
    plane.engine.hold = asyncio.Event()
    plane.engine.replies = [text + "<|im_end|>"]


async def test_parts_come_past_the_task_and_the_end_behind_the_record(plane: Any) -> None:
    plane.log.gate.clear()
    plane.engine.replies = [TEXT + "<|im_end|>"]
    answer, _, task = plane.client.start(PATH, BODY)
    await wait_for_text(answer, TEXT)
    await plane.log.completing.wait()
    assert answer.put > 1
    assert b'"finish_reason":"stop"' not in answer.body
    plane.log.gate.set()
    await task
    assert answer.ended
    assert answer.body.rstrip().endswith(b"data: [DONE]")


async def test_a_client_that_does_not_read_holds_nobody_up_and_loses_nothing(plane: Any) -> None:
    held(plane)
    slow, _, first = plane.client.start(PATH, BODY)
    await wait_for_text(slow, "a")
    slow.reads.clear()
    quick, _, second = plane.client.start(PATH, BODY, headers=RETRY)
    await wait_for_text(quick, TEXT[:-2])
    assert TEXT[:-2] not in text_sent(slow)
    plane.engine.hold.set()
    await second
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.COMPLETED
    assert not slow.ended
    slow.reads.set()
    await first
    assert text_sent(slow) == text_sent(quick) == TEXT
    assert len(plane.engine.seen) == 1


async def test_a_reader_that_joins_late_has_the_same_parts_in_order(plane: Any) -> None:
    held(plane)
    began, _, first = plane.client.start(PATH, BODY)
    await wait_for_text(began, TEXT[:-2])
    late, _, second = plane.client.start(PATH, BODY, headers=RETRY)
    await wait_for_text(late, TEXT[:-2])
    plane.engine.hold.set()
    await asyncio.gather(first, second)
    assert text_sent(late) == text_sent(began) == TEXT


async def test_one_of_two_readers_leaves(plane: Any) -> None:
    held(plane)
    left, hang_up, first = plane.client.start(PATH, BODY)
    await wait_for_text(left, "a")
    stayed, _, second = plane.client.start(PATH, BODY, headers=RETRY)
    await wait_for_text(stayed, "a")
    hang_up.set()
    await first
    plane.engine.hold.set()
    await second
    assert text_sent(stayed) == TEXT
    assert stayed.ended
    assert not left.ended
    assert plane.engine.cancelled == 0


async def test_a_write_that_fails_ends_its_reader_alone(plane: Any) -> None:
    held(plane)
    broken, _, first = plane.client.start(PATH, BODY)
    await wait_for_text(broken, "a")
    other, _, second = plane.client.start(PATH, BODY, headers=RETRY)
    await wait_for_text(other, "a")
    broken.fails = True
    with pytest.raises(BrokenReply):
        await first
    plane.engine.hold.set()
    await second
    assert text_sent(other) == TEXT
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.COMPLETED
    assert not broken.ended


async def test_silence_after_parts_is_filled(brisk: Any) -> None:
    held(brisk)
    answer, _, task = brisk.client.start(PATH, BODY)
    await wait_for_text(answer, TEXT[:-2])
    async with asyncio.timeout(20):
        while answer.body.count(b": keep-alive") < 3:
            answer.grown.clear()
            await answer.grown.wait()
    brisk.engine.hold.set()
    await task
    assert text_sent(answer) == TEXT
    assert answer.ended


async def test_silence_is_counted_from_the_last_event() -> None:
    loop = asyncio.get_running_loop()
    reader = WaitingReader(lambda events: True, silence_s=0.1)
    last = loop.time()
    for _ in range(4):
        await asyncio.sleep(0.04)
        if not reader.woken.done():
            reader.give([None])  # type: ignore[list-item]
            last = loop.time()
    assert await reader.woken is False
    assert loop.time() - last >= 0.099
    assert reader.taken > 0
    reader.stop()


async def test_a_reader_that_is_woken_gets_no_more_by_put() -> None:
    given: list[Any] = []

    def put(events: Any) -> bool:
        given.extend(events)
        return len(given) < 2

    reader = WaitingReader(put, silence_s=60)
    for event in "abc":
        reader.give([event])  # type: ignore[list-item]
    reader.wake()
    assert await reader.woken is True
    assert (given, reader.taken) == (["a", "b"], 1)
    reader.stop()


@pytest.mark.parametrize("reads", [True, False])
async def test_both_ways_write_the_same(plane: Any, reads: bool) -> None:
    """Where the server has no such parts, all of them go by `send`."""
    plane.engine.replies = [TEXT + "<|im_end|>"]
    answer = Answer(has_parts=reads)
    _, _, task = plane.client.start(PATH, BODY, answer=answer)
    await task
    assert text_sent(answer) == TEXT
    assert (answer.put > 0) is reads


@pytest.mark.parametrize("stored", [True, False])
async def test_what_a_chat_upstream_says_waits_for_the_intent(stored: bool) -> None:
    """The prompt comes inside a read, which can't wait until the intent is durable."""
    durable, published = asyncio.Event(), []

    async def begin() -> None:
        await durable.wait()
        if not stored:
            raise StoreUnavailable("the store is down", retry_after=1)

    intent = IntentInReply(begin, published.extend)
    intent.publish(["before"])  # type: ignore[list-item]
    intent.write()
    for event in ("a", "b"):
        intent.publish([event])  # type: ignore[list-item]
    await asyncio.sleep(0)
    assert published == ["before"]
    durable.set()
    await intent.ended()
    intent.publish(["c"])  # type: ignore[list-item]
    assert intent.failed is not stored
    if stored:
        intent.check()
        assert published == ["before", "a", "b", "c"]
    else:
        with pytest.raises(StoreUnavailable):
            intent.check()
        assert published == ["before"]
