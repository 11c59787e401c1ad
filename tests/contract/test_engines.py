"""One contract for every engine client with a token API, over real HTTP to the scripted engine.

Chunks come in order and the last one has `finish`; log-probs are one per id or said to be missing; every token has its
weight version; nothing is tried again after its first token; giving up is seen by the server at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rolltap.engine.scripted import Fault, Prompt, Reply, ScriptedEngine, Turn, logprob_of, say
from rolltap.engine.scripted.sampling import experts_of
from rolltap.engine.tiny import FOLDER
from rolltap.errors import (
    ContextOverflow,
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    RateLimited,
)
from rolltap.proxy.engines import ENGINES
from rolltap.proxy.engines.base import Engine, SampleChunk, SampleRequest
from rolltap.proxy.engines.retries import Retries
from rolltap.settings import EngineSettings
from rolltap.types import VersionSpan

STREAMING = {"vllm": "vllm", "vllm-completions": "vllm", "sglang": "sglang", "sglang-incremental": "sglang"}
"""The scripted server's wire, and the client's kind."""

WIRES = {**STREAMING, "llamacpp": "llamacpp"}
EXPERTS = {"vllm-experts": "vllm", "sglang": "sglang", "sglang-incremental": "sglang"}

PROMPT = [5, 6, 7, 8]
TURN = Turn(ids=(10, 11, 12, 13, 14))


@dataclass
class World:
    """A scripted server and a client of it."""

    server: ScriptedEngine
    engine: Engine

    def request(self, **fields: Any) -> SampleRequest:
        settings = {"id": "call", "model": "scripted", "prompt_ids": PROMPT, "max_tokens": 100, "session_id": "s"}
        return SampleRequest(**{**settings, **fields})

    async def sample(self, **fields: Any) -> list[SampleChunk]:
        return [chunk async for chunk in self.engine.sample(self.request(**fields))]

    async def sample_until_error(self) -> tuple[list[SampleChunk], EngineError | None]:
        """What came, and what ended it."""
        chunks: list[SampleChunk] = []
        try:
            async for chunk in self.engine.sample(self.request()):
                chunks.append(chunk)
        except EngineError as error:
            return chunks, error
        return chunks, None


Start = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield session


def starter(wire: str, http: aiohttp.ClientSession) -> Start:
    """Starts worlds: the turns that every prompt gets (or a function that says them), and the client's settings."""
    kind: Any = {**WIRES, **EXPERTS}[wire]

    @asynccontextmanager
    async def started(*turns: Turn | str | Reply, context: int = 4096, mode: Any = "processed", **settings: Any):
        script: Any = turns[0] if callable(turns[0]) else say(*turns)  # type: ignore[arg-type]
        async with ScriptedEngine(script, FOLDER, wire=wire, context=context, mode=mode) as server:
            settled = EngineSettings(kind=kind, url=server.url, **settings)
            client = ENGINES[kind]("main", settled, http, retries=Retries(first_wait_s=0))
            yield World(server, client)
            await client.close()

    return started


@pytest.fixture(params=WIRES)
def start_any(request: pytest.FixtureRequest, http: aiohttp.ClientSession) -> Start:
    return starter(request.param, http)


@pytest.fixture(params=STREAMING)
def start(request: pytest.FixtureRequest, http: aiohttp.ClientSession) -> Start:
    """Servers that stream, and take new weights."""
    return starter(request.param, http)


def ids_of(chunks: list[SampleChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs_of(chunks: list[SampleChunk]) -> list[float]:
    assert all(chunk.logprobs is not None for chunk in chunks)
    return [value for chunk in chunks for value in chunk.logprobs or ()]


EXACT = [logprob_of(token, at) for at, token in enumerate(TURN.ids or ())]


async def test_tokens_come_as_sampled(start_any: Start):
    async with start_any(TURN) as world:
        chunks = await world.sample()
    assert ids_of(chunks) == list(TURN.ids or ())
    assert logprobs_of(chunks) == EXACT
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
    assert chunks[-1].finish == "stop"
    assert world.server.journal.entries[0].prompt_ids == PROMPT


@pytest.mark.parametrize("size", [1, 2, 5, 100])
async def test_any_number_of_tokens_a_event(start_any: Start, size: int):
    async with start_any(Turn(ids=TURN.ids, tokens_per_event=size)) as world:
        chunks = await world.sample()
    assert ids_of(chunks) == list(TURN.ids or ())
    assert logprobs_of(chunks) == EXACT


async def test_a_length_limit_is_a_finish_of_its_own(start_any: Start):
    async with start_any(TURN) as world:
        chunks = await world.sample(max_tokens=3)
    assert ids_of(chunks) == [10, 11, 12]
    assert chunks[-1].finish == "length"


async def test_a_stop_token_ends_the_output_and_is_part_of_it(start_any: Start):
    async with start_any(TURN) as world:
        chunks = await world.sample(stop_token_ids=(12,))
    assert ids_of(chunks) == [10, 11, 12]
    assert chunks[-1].finish == "stop"


async def test_candidates_of_each_position(start_any: Start):
    async with start_any(TURN) as world:
        chunks = await world.sample(top_logprobs=3)
    for chunk in chunks:
        assert chunk.extras["top_ids"].shape == (len(chunk.token_ids), 3)
        assert set(chunk.token_ids) <= set(chunk.extras["top_ids"].ravel().tolist())
        assert (chunk.extras["top_logprobs"][:, :-1] >= chunk.extras["top_logprobs"][:, 1:]).all()


@pytest.mark.parametrize("wire", EXPERTS)
@pytest.mark.parametrize("size", [1, 3])
async def test_the_experts_that_sampled_each_token(http: aiohttp.ClientSession, wire: str, size: int):
    """Token i was sampled by the pass that read the token before it."""
    async with starter(wire, http)(Turn(ids=TURN.ids, tokens_per_event=size)) as world:
        chunks = await world.sample(routed_experts=True)
        without = await world.sample()
    ids = TURN.ids or ()
    read = experts_of([PROMPT[-1], *ids[:-1]])
    assert all(not chunk.whole for chunk in [*chunks[:-1], *without])
    found = chunks[-1].whole["routed_experts"]
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found.reshape(read.shape), read)


async def test_a_pushed_version_is_on_every_token(start: Start, tmp_path: Path):
    async with start(TURN, TURN) as world:
        await world.engine.pause("keep")
        await world.engine.load_weights(str(tmp_path), 7)
        await world.engine.resume()
        facts = await world.engine.probe()
        chunks = await world.sample()
        assert world.server.weights.path == str(tmp_path)
        assert world.server.weights.version == "7"
    if facts.weight_versions:
        assert chunks[-1].versions == (VersionSpan(7, 0, 5),)
    else:
        assert chunks[-1].versions is None


async def test_a_swap_in_mid_output_splits_the_versions(start: Start, tmp_path: Path):
    async with start(Turn(ids=TURN.ids, hold=2)) as world:
        sampling = asyncio.create_task(world.sample())
        await world.server.journal.until(lambda entries: any(len(entry.output) == 2 for entry in entries))
        await world.engine.pause("keep")
        await world.engine.load_weights(str(tmp_path), 7)
        world.server.release()
        await world.engine.resume()
        chunks = await sampling
    assert ids_of(chunks) == list(TURN.ids or ())
    if chunks[-1].versions is not None:
        assert chunks[-1].versions == (VersionSpan(0, 0, 2), VersionSpan(7, 2, 5))


def adapter_in(folder: Path) -> str:
    """A folder like those that peft writes."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize("wire", ["vllm", "vllm-completions"])
async def test_an_adapter_is_loaded_in_place_of_the_former(http: aiohttp.ClientSession, wire: str, tmp_path: Path):
    first, second = adapter_in(tmp_path / "first"), adapter_in(tmp_path / "second")
    async with starter(wire, http)(Turn(ids=TURN.ids, hold=2)) as world:
        await world.engine.load_weights(first, 6, "policy")
        sampling = asyncio.create_task(world.sample(model="policy"))
        await world.server.journal.until(lambda entries: any(len(entry.output) == 2 for entry in entries))
        await world.engine.pause("keep")
        await world.engine.load_weights(second, 7, "policy")
        world.server.release()
        await world.engine.resume()
        chunks = await sampling
        assert world.server.weights.adapters == {"policy": second}
        assert world.server.weights.path is None
        assert (await world.engine.probe()).models == ("scripted", "policy")
    if chunks[-1].versions is not None:
        assert chunks[-1].versions == (VersionSpan(6, 0, 2), VersionSpan(7, 2, 5))


@pytest.mark.parametrize("name", ["policy", "scripted"])
async def test_an_adapter_that_can_not_be_loaded_leaves_the_former(
    http: aiohttp.ClientSession, name: str, tmp_path: Path
):
    adapter = adapter_in(tmp_path / "adapter")
    async with starter("vllm", http)(TURN) as world:
        await world.engine.load_weights(adapter, 6, "policy")
        path = str(tmp_path / "missing") if name == "policy" else adapter
        with pytest.raises(EngineRefused, match=rf"adapter '{name}' serves as before"):
            await world.engine.load_weights(path, 7, name)
        assert (world.server.weights.adapters, world.server.weights.version) == ({"policy": adapter}, "6")


async def test_a_server_that_loads_no_adapters_needs_its_flags(http: aiohttp.ClientSession):
    async with starter("sglang", http)(TURN) as world:
        settings = EngineSettings(kind="vllm", url=world.server.url)
        with pytest.raises(EngineRefused, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await ENGINES["vllm"]("main", settings, http, retries=Retries()).load_weights("folder", 7, "policy")


async def test_only_vllm_loads_adapters(http: aiohttp.ClientSession, tmp_path: Path):
    async with starter("sglang", http)(TURN) as world:
        with pytest.raises(EngineRefused, match="by vLLM only; push merged weights"):
            await world.engine.load_weights(adapter_in(tmp_path / "adapter"), 1, "policy")


async def test_draining_waits_for_what_is_under_way(start: Start):
    async with start(Turn(ids=TURN.ids, hold=2)) as world:
        sampling = asyncio.create_task(world.sample())
        await world.server.journal.until(lambda entries: any(len(entry.output) == 2 for entry in entries))
        draining = asyncio.create_task(world.engine.pause("drain"))
        world.server.release()
        await draining
        assert world.server.journal.entries[0].outcome == "finished"
        assert (await sampling)[-1].finish == "stop"
        await world.engine.resume()
        assert ids_of(await world.sample()) == list(TURN.ids or ())


async def test_aborting_ends_what_is_under_way(start: Start):
    async with start(Turn(ids=TURN.ids, hold=2)) as world:
        sampling = asyncio.create_task(world.sample())
        await world.server.journal.until(lambda entries: any(len(entry.output) == 2 for entry in entries))
        await world.engine.pause("abort")
        world.server.release()
        chunks = await sampling
    assert chunks[-1].finish == "abort"
    assert ids_of(chunks) == [10, 11]


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("no_logprobs", lambda chunks: any(chunk.logprobs is None for chunk in chunks)),
        ("short_logprobs", lambda chunks: any(chunk.logprobs is None for chunk in chunks)),
        ("nan_logprobs", lambda chunks: any(math.isnan(value) for value in logprobs_of(chunks))),
        ("null_logprobs", lambda chunks: any(math.isnan(value) for value in logprobs_of(chunks))),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
async def test_logprobs_are_never_made_up(start_any: Start, kind: Any, check: Callable[..., bool], after: int):
    async with start_any(Turn(ids=TURN.ids, fault=Fault(kind=kind, after=after))) as world:
        chunks = await world.sample()
    assert ids_of(chunks) == list(TURN.ids or ())
    assert check(chunks)


async def test_logprobs_before_the_missing_ones_are_kept(start: Start):
    async with start(Turn(ids=TURN.ids, fault=Fault(kind="no_logprobs", after=3))) as world:
        chunks = await world.sample()
    assert logprobs_of(chunks[:3]) == EXACT[:3]
    assert [chunk.logprobs for chunk in chunks[3:]] == [None, None]


async def test_a_prompt_that_was_altered_is_shown(start: Start):
    async with start(Turn(ids=TURN.ids, fault=Fault(kind="altered_prompt"))) as world:
        chunks = await world.sample()
    assert list(chunks[0].prompt_ids or ()) != PROMPT


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_refusals_for_now_are_tried_again(start_any: Start, status: int):
    fault = Fault(kind="status", status=status, retry_after=0, times=2)
    async with start_any(Turn(ids=TURN.ids, fault=fault)) as world:
        chunks = await world.sample()
        assert [entry.outcome for entry in world.server.journal.entries] == ["status", "status", "finished"]
    assert ids_of(chunks) == list(TURN.ids or ())
    assert len(chunks[0].attempts) == 2
    assert all(not chunk.attempts for chunk in chunks[1:])


@pytest.mark.parametrize(("status", "error"), [(429, RateLimited), (500, EngineUnavailable)])
async def test_tries_are_bounded(start_any: Start, status: int, error: type[Exception]):
    fault = Fault(kind="status", status=status, retry_after=0, times=0)
    async with start_any(Turn(ids=TURN.ids, fault=fault)) as world:
        with pytest.raises(error, match="try 4"):
            await world.sample()
        assert len(world.server.journal.entries) == 4


async def test_a_long_retry_after_is_passed_on(start_any: Start):
    async with start_any(Turn(ids=TURN.ids, fault=Fault(kind="status", status=429, retry_after=60))) as world:
        with pytest.raises(RateLimited) as caught:
            await world.sample()
        assert len(world.server.journal.entries) == 1
    assert caught.value.retry_after == 60


@pytest.mark.parametrize("after", range(1, 6))
async def test_nothing_is_tried_again_after_the_first_token(start: Start, after: int):
    async with start(Turn(ids=TURN.ids, fault=Fault(kind="cut", after=after, times=0))) as world:
        chunks, error = await world.sample_until_error()
        assert isinstance(error, EngineUnavailable)
        assert len(world.server.journal.entries) == 1
    assert ids_of(chunks) == list(TURN.ids or ())[:after]
    assert all(chunk.finish is None for chunk in chunks)


async def test_a_connection_lost_before_the_first_token_is_tried_again(start_any: Start):
    async with start_any(Turn(ids=TURN.ids, fault=Fault(kind="cut", after=0))) as world:
        chunks = await world.sample()
        assert len(world.server.journal.entries) == 2
    assert ids_of(chunks) == list(TURN.ids or ())
    assert len(chunks[0].attempts) == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [("garbage", EngineProtocolError), ("unfinished", EngineProtocolError), ("error", EngineUnavailable)],
)
@pytest.mark.parametrize("after", [1, 3, 5])
async def test_broken_streams_are_no_answers(start: Start, kind: Any, error: type[EngineError], after: int):
    async with start(Turn(ids=TURN.ids, fault=Fault(kind=kind, after=after, times=0))) as world:
        with pytest.raises(error):
            await world.sample()
        assert len(world.server.journal.entries) == 1


async def test_a_stream_may_break_at_any_byte(start: Start):
    """Whatever was given out before the break is a prefix of the output, and the break is never taken for an end."""
    at = 0

    def reply(prompt: Prompt) -> Turn:
        return Turn(ids=(10, 11, 12), fault=Fault(kind="cut", at_byte=at, times=0))

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
    async with start(Turn(ids=TURN.ids, fault=Fault(kind="abort", after=2))) as world:
        chunks = await world.sample()
    assert ids_of(chunks) == [10, 11]
    assert chunks[-1].finish == "abort"


@pytest.mark.parametrize("after", [0, 1, 4])
async def test_silence_is_a_timeout(start_any: Start, after: int):
    limits = {"first_byte_s": 0.2, "idle_s": 0.2}
    async with start_any(Turn(ids=TURN.ids, fault=Fault(kind="hang", after=after, times=0)), **limits) as world:
        with pytest.raises(EngineTimeout):
            await world.sample()
        (entry,) = await world.server.journal.over(1)
        assert entry.outcome == "cancelled"


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_giving_up_is_seen_by_the_server_within_100_ms(start_any: Start, after: int):
    async with start_any(Turn(ids=TURN.ids, fault=Fault(kind="hang", after=after, times=0))) as world:
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


async def test_closing_the_iterator_cancels(start: Start):
    async with start(Turn(ids=TURN.ids, fault=Fault(kind="hang", after=2, times=0))) as world:
        chunks: Any = world.engine.sample(world.request())
        async with aclosing(chunks):
            await anext(chunks)
        (entry,) = await world.server.journal.over(1)
        assert entry.outcome == "cancelled"


async def test_connections_are_used_again(start_any: Start, http: aiohttp.ClientSession):
    async with start_any(*[TURN] * 20) as world:
        for _ in range(20):
            await world.sample()
        assert http.connector is not None
        assert sum(len(pool) for pool in http.connector._conns.values()) == 1


async def test_a_prompt_that_does_not_fit(start_any: Start):
    async with start_any(TURN, context=4) as world:
        with pytest.raises(ContextOverflow) as caught:
            await world.sample()
        assert (caught.value.tokens, caught.value.limit) == (4, 4)


@pytest.mark.parametrize("mode", ["processed", "raw"])
async def test_the_probe_tells_what_the_server_gives(start: Start, mode: str):
    async with start(TURN, mode=mode) as world:
        facts = await world.engine.probe()
    assert facts.models == ("scripted",)
    assert facts.max_context == 4096
    assert facts.weight_updates
    assert facts.logprobs_mode == mode
    assert len(facts.notes) == (mode == "raw") + (not facts.weight_versions)


async def test_llama_cpp_says_what_it_can_not(http: aiohttp.ClientSession, tmp_path: Path):
    async with starter("llamacpp", http)(TURN) as world:
        facts = await world.engine.probe()
        with pytest.raises(EngineRefused, match="can't change its weights"):
            await world.engine.load_weights(str(tmp_path), 1)
    assert (facts.max_context, facts.logprobs_mode, facts.weight_updates) == (4096, "raw", False)
    assert "replies come in one piece" in facts.notes


async def test_a_server_that_is_down(http: aiohttp.ClientSession, start_any: Start):
    async with start_any(TURN) as world:
        pass
    with pytest.raises(EngineUnavailable, match="can't be reached"):
        await world.engine.probe()


async def test_a_conversation_extends_token_for_token(start_any: Start):
    async with start_any("one", "two", "three") as world:
        prompt = PROMPT
        for _ in range(3):
            output = ids_of(await world.sample(prompt_ids=prompt))
            prompt = [*prompt, *output, 9]
        await world.sample(prompt_ids=[*PROMPT, 1])
        entries = list(world.server.journal.entries)
    assert [entry.extends for entry in entries] == [None, True, True, False]
    assert [entry.turn for entry in entries] == [0, 1, 2, 0]
