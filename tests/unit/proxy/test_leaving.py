"""Clients that leave and come back, and replies that must not look finished before they are recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rolltap.errors import EngineError
from rolltap.proxy.call.http_exchange import BrokenReply
from rolltap.proxy.engines.base import SampleRequest, Take
from rolltap.types import Outcome
from tests.unit.proxy.conftest import ToldEngine, serve, text_sent, wait_for_text

USER = {"role": "user", "content": "list the files"}


async def test_the_end_waits_until_the_call_is_durable(plane: Any) -> None:
    plane.log.gate.clear()
    plane.engine.replies = ["some text here<|im_end|>"]
    body = {"model": "tiny", "messages": [USER], "stream": True}
    answer, _, task = plane.client.start("/v1/chat/completions", body)
    await wait_for_text(answer, "text here")
    await plane.log.completing.wait()
    assert b"[DONE]" not in answer.body
    assert not answer.ended
    plane.log.gate.set()
    await task
    assert b"[DONE]" in answer.body
    assert answer.ended


async def test_a_client_that_leaves_cancels_the_engine_and_is_recorded(plane: Any) -> None:
    plane.engine.hold = asyncio.Event()
    plane.engine.replies = ["a long answer that nobody waits for<|im_end|>"]
    body = {"model": "tiny", "messages": [USER], "stream": True}
    answer, hang_up, task = plane.client.start("/v1/chat/completions", body)
    await wait_for_text(answer, "long")
    hang_up.set()
    await task
    async with asyncio.timeout(20):
        while (await plane.rows())[0].delivered is None:  # noqa: ASYNC110  the record is the event
            await asyncio.sleep(0)
    (row,) = await plane.rows()
    assert plane.engine.cancelled == 1
    assert row.completion.outcome is Outcome.ABORTED
    assert len(row.completion.output_ids) > 0
    assert row.delivered is False
    assert not row.call().trainable


async def test_a_client_that_leaves_while_its_call_is_recorded_has_missed_it_until_a_retry(plane: Any) -> None:
    plane.log.gate.clear()
    plane.engine.replies = ["some text here<|im_end|>"]
    body = {"model": "tiny", "messages": [USER], "stream": True}
    answer, hang_up, task = plane.client.start("/v1/chat/completions", body)
    await wait_for_text(answer, "text here")
    await plane.log.completing.wait()
    hang_up.set()
    await answer.departed.wait()
    plane.log.gate.set()
    await task
    await plane.recorder.drain()
    (row,) = await plane.rows()
    assert (row.completion.outcome, row.delivered) == (Outcome.COMPLETED, False)
    answer, _, retry = plane.client.start("/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
    await retry
    await plane.recorder.drain()
    (row,) = await plane.rows()
    assert answer.ended
    assert row.delivered is True
    assert len(plane.engine.seen) == 1


async def test_an_engine_that_breaks_off_never_looks_finished(plane: Any) -> None:
    plane.engine.failure = EngineError("broke off")
    plane.engine.replies = ["half an answer<|im_end|>"]
    body = {"model": "tiny", "messages": [USER], "stream": True}
    answer, _, task = plane.client.start("/v1/chat/completions", body)
    with pytest.raises(BrokenReply):
        await task
    assert not answer.ended
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.ENGINE_ERROR


async def test_a_marked_retry_joins_the_call_in_flight(plane: Any) -> None:
    plane.engine.hold = asyncio.Event()
    plane.engine.replies = ["a long answer<|im_end|>"]
    body = {"model": "tiny", "messages": [USER], "stream": True}
    began, _, first = plane.client.start("/v1/chat/completions", body)
    await wait_for_text(began, "a long")
    answer, _, second = plane.client.start("/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
    await wait_for_text(answer, "a long")
    plane.engine.hold.set()
    await asyncio.gather(first, second)
    assert answer.status == 200
    assert text_sent(answer) == text_sent(began) == "a long answer"
    assert len(plane.engine.seen) == 1
    assert len(await plane.rows()) == 1


GEMINI = "/v1beta/models/tiny"


@pytest.mark.parametrize(
    ("path", "query", "joins"),
    [
        (f"{GEMINI}:generateContent", "key=key", True),
        (f"{GEMINI}:generateContent", "key=rotated", True),
        (f"{GEMINI}:generateContent", "", True),
        (f"{GEMINI}:streamGenerateContent", "alt=sse", False),
    ],
)
async def test_a_marked_retry_has_the_url_of_the_call_that_it_joins(
    plane: Any, path: str, query: str, joins: bool
) -> None:
    plane.engine.hold = asyncio.Event()
    body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    _, _, first = plane.client.start(f"{GEMINI}:generateContent", body, query="key=key")
    while not plane.engine.seen:  # noqa: ASYNC110  the engine's log is the event
        await asyncio.sleep(0)
    marked = {"x-stainless-retry-count": "1", "x-goog-api-key": "key"}
    answer, _, second = plane.client.start(path, body, query=query, headers=marked)
    plane.engine.hold.set()
    await asyncio.gather(first, second)
    assert len(plane.engine.seen) == (1 if joins else 2)
    assert answer.headers["content-type"].startswith("text/event-stream" if "stream" in path else "application/json")


class SlowToStop(ToldEngine):
    """Takes until `stopped` is set to give up a request."""

    stopped = asyncio.Event()

    async def sample(self, request: SampleRequest, take: Take) -> None:
        try:
            await super().sample(request, take)
        finally:
            await self.stopped.wait()


async def test_a_marked_retry_does_not_join_a_call_that_is_being_cancelled(plane: Any, tokenizer: Any) -> None:
    held = asyncio.Event()
    engine = SlowToStop(tokenizer, hold=held)
    client = serve(plane.log, engine, plane.session, plane.limits).client
    body = {"model": "tiny", "messages": [USER]}
    _, hang_up, first = client.start("/v1/chat/completions", body)
    while not engine.seen:  # noqa: ASYNC110  the engine's log is the event
        await asyncio.sleep(0)
    hang_up.set()
    await first
    answer, _, second = client.start("/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
    while len(engine.seen) < 2:  # noqa: ASYNC110  the engine's log is the event
        await asyncio.sleep(0)
    held.set()
    engine.stopped.set()
    await second
    assert answer.status == 200
    assert len(engine.seen) == 2


async def test_an_unmarked_identical_request_is_a_new_sample(plane: Any) -> None:
    await plane.client.chat(USER)
    await plane.client.chat(USER)
    one, two = await plane.rows()
    np.testing.assert_array_equal(one.prompt_ids, two.prompt_ids)
    assert two.intent.parent_id is None


async def test_a_client_that_leaves_a_quick_call_gets_its_reply_on_a_retry(plane: Any) -> None:
    """The reply is there before anybody watches for the client. Whether it had left decides what a retry gets."""
    body = {"model": "tiny", "messages": [USER]}
    first, hang_up, task = plane.client.start("/v1/chat/completions", body)
    hang_up.set()
    await task
    retry = await plane.client.post("/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
    await plane.recorder.drain()
    assert retry.status == 200
    assert len(plane.engine.seen) == 1
    assert [row.delivered for row in await plane.rows()] == [True]
    assert first.json() == retry.json()
