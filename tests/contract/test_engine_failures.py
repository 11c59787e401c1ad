"""What every engine client does when its server fails, or when nobody waits any more.

Nothing is tried again after its first token; giving up is seen by the server at once.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rolltap.engine.scripted import Fault, Prompt, ScriptedReply
from rolltap.errors import (
    EngineError,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    RateLimited,
)
from rolltap.proxy.engines.base import SampleChunk

from .engine_world import REPLY, Start, collect, ids_of


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_refusals_for_now_are_tried_again(start_any: Start, status: int):
    fault = Fault(kind="status", status=status, retry_after=0, times=2)
    async with start_any(ScriptedReply(ids=REPLY.ids, fault=fault)) as world:
        chunks = await world.sample()
        assert [entry.outcome for entry in world.server.journal.entries] == ["status", "status", "finished"]
    assert ids_of(chunks) == list(REPLY.ids or ())


@pytest.mark.parametrize(("status", "error"), [(429, RateLimited), (500, EngineUnavailable)])
async def test_tries_are_bounded(start_any: Start, status: int, error: type[Exception]):
    fault = Fault(kind="status", status=status, retry_after=0, times=0)
    async with start_any(ScriptedReply(ids=REPLY.ids, fault=fault)) as world:
        with pytest.raises(error, match="try 4"):
            await world.sample()
        assert len(world.server.journal.entries) == 4


async def test_a_long_retry_after_is_passed_on(start_any: Start):
    async with start_any(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="status", status=429, retry_after=60))) as world:
        with pytest.raises(RateLimited) as caught:
            await world.sample()
        assert len(world.server.journal.entries) == 1
    assert caught.value.retry_after == 60


async def test_a_whole_reply_is_tried_again_until_it_is_there(start_any: Start):
    async with start_any(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="cut", after=3))) as world:
        chunks = await world.sample(stream=False)
        assert len(world.server.journal.entries) == 2
    assert ids_of(chunks) == list(REPLY.ids or ())


async def test_giving_up_on_a_whole_reply_is_seen_by_the_server(start_any: Start):
    async with start_any(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="hang", after=3, times=0))) as world:
        task = asyncio.create_task(world.sample(stream=False))
        await world.server.journal.until(lambda entries: any(len(entry.output) == 3 for entry in entries))
        task.cancel()
        (entry,) = await world.server.journal.over(1)
        assert entry.outcome == "cancelled"
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("after", range(1, 6))
async def test_nothing_is_tried_again_after_the_first_token(start: Start, after: int):
    async with start(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="cut", after=after, times=0))) as world:
        chunks, error = await world.sample_until_error()
        assert isinstance(error, EngineUnavailable)
        assert len(world.server.journal.entries) == 1
    assert ids_of(chunks) == list(REPLY.ids or ())[:after]
    assert all(chunk.finish is None for chunk in chunks)


async def test_a_connection_lost_before_the_first_token_is_tried_again(start_any: Start):
    async with start_any(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="cut", after=0))) as world:
        chunks = await world.sample()
        assert len(world.server.journal.entries) == 2
    assert ids_of(chunks) == list(REPLY.ids or ())


@pytest.mark.parametrize(
    ("kind", "error"),
    [("garbage", EngineProtocolError), ("unfinished", EngineProtocolError), ("error", EngineUnavailable)],
)
@pytest.mark.parametrize("after", [1, 3, 5])
async def test_broken_streams_are_no_answers(start: Start, kind: Any, error: type[EngineError], after: int):
    async with start(ScriptedReply(ids=REPLY.ids, fault=Fault(kind=kind, after=after, times=0))) as world:
        with pytest.raises(error):
            await world.sample()
        assert len(world.server.journal.entries) == 1


async def test_a_stream_may_break_at_any_byte(start: Start):
    """Whatever was given out before the break is a prefix of the output, and the break is never taken for an end."""
    at = 0

    def reply(prompt: Prompt) -> ScriptedReply:
        return ScriptedReply(ids=(10, 11, 12), fault=Fault(kind="cut", at_byte=at, times=0))

    async with start(reply) as world:
        chunks: list[SampleChunk] = []
        error: EngineError | None = EngineUnavailable("")
        while error is not None:
            at += 41
            chunks, error = await world.sample_until_error()
            assert error is None or isinstance(error, EngineUnavailable)
            assert ids_of(chunks) == [10, 11, 12][: len(ids_of(chunks))]
        assert chunks[-1].finish == "stop"


async def test_an_engine_that_aborts_says_so(start: Start):
    async with start(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="abort", after=2))) as world:
        chunks = await world.sample()
    assert ids_of(chunks) == [10, 11]
    assert chunks[-1].finish == "abort"


@pytest.mark.parametrize("after", [0, 1, 4])
async def test_silence_is_a_timeout(start_any: Start, after: int):
    limits = {"first_byte_s": 0.2, "idle_s": 0.2}
    async with start_any(
        ScriptedReply(ids=REPLY.ids, fault=Fault(kind="hang", after=after, times=0)), **limits
    ) as world:
        with pytest.raises(EngineTimeout):
            await world.sample(max_tokens=5)  # what comes whole may take longer, by its length
        (entry,) = await world.server.journal.over(1)
        assert entry.outcome == "cancelled"


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_giving_up_is_seen_by_the_server_within_100_ms(start_any: Start, after: int):
    async with start_any(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="hang", after=after, times=0))) as world:
        took: list[float] = []
        for number in range(1, 4):
            task = asyncio.create_task(world.sample())
            await world.server.journal.until(
                lambda entries, number=number: sum(len(entry.output) == after for entry in entries) == number
            )
            began = time.perf_counter()
            task.cancel()
            entries = await world.server.journal.over(number)
            took.append(time.perf_counter() - began)
            assert entries[-1].outcome == "cancelled"
            with pytest.raises(asyncio.CancelledError):
                await task
        assert min(took) < 0.1


async def test_wanting_no_more_cancels(start: Start):
    async with start(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="hang", after=2, times=0))) as world:
        assert len(await collect(world.engine.sample, world.request(), wanted=1)) == 1
        (entry,) = await world.server.journal.over(1)
        assert entry.outcome == "cancelled"


async def test_a_server_that_is_down(start_any: Start):
    async with start_any(REPLY) as world:
        pass
    with pytest.raises(EngineUnavailable, match="can't be reached"):
        await world.engine.probe()
