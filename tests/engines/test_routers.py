"""rolltap's engine clients behind the real routers of vLLM and SGLang, with four scripted engines behind those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from rolltap.engine.scripted import Fault, Script, ScriptedEngine, ScriptedReply
from rolltap.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable, RateLimited
from rolltap.ids import new_id
from rolltap.proxy.engines.base import Engine, SampleChunk, SampleRequest
from rolltap.proxy.engines.registry import open_engine
from rolltap.settings import EngineSettings
from rolltap.types import VersionSpan

from ..contract.engine_world import EXACT, REPLY, collect, ids_of, logprobs_of
from .routers import STICKY, install, router, scripted_engines

CONTEXT = 4096
SESSIONS = 16

World = tuple[list[ScriptedEngine], Engine]
Start = Callable[[ScriptedReply], AbstractAsyncContextManager[World]]


@pytest.fixture(scope="session")
def installed_routers() -> None:
    install()


@pytest.fixture(params=STICKY)
def start(request: pytest.FixtureRequest, installed_routers: None) -> Start:
    return partial(behind_a_router, request.param)


@asynccontextmanager
async def behind_a_router(kind: str, reply: ScriptedReply) -> AsyncIterator[World]:
    """Four engines that give `reply`, and a client of the router in front of them."""
    async with (
        scripted_engines(kind, Script(otherwise=reply), CONTEXT) as engines,
        router(kind, [engine.url for engine in engines], "--policy", STICKY[kind]) as url,
    ):
        client = open_engine("main", EngineSettings.model_validate({"kind": kind, "url": url}))
        yield engines, client
        await client.close()


def request_of(session: int, *, stream: bool = True, tokens: int = 4) -> SampleRequest:
    """A call of a session, whose number is the first of its prompt's tokens."""
    prompt = [100 + session, *range(5, 4 + tokens)]
    return SampleRequest(
        id=new_id(), model="scripted", prompt_ids=prompt, max_tokens=100, session_id=f"s{session}", stream=stream
    )


async def sample(client: Engine, session: int, *, stream: bool = True, tokens: int = 4) -> list[SampleChunk]:
    return await collect(client.sample, request_of(session, stream=stream, tokens=tokens))


def places_of(engines: list[ScriptedEngine], session: int) -> set[int]:
    """The engines that got calls of a session."""
    return {
        place
        for place, engine in enumerate(engines)
        if any(entry.prompt_ids[0] == 100 + session for entry in engine.journal.entries)
    }


async def test_every_token_comes_as_without_a_router_and_a_session_stays(start: Start) -> None:
    async with start(REPLY) as (engines, client):
        facts = await client.probe()
        assert (facts.models, facts.logprobs_mode, facts.weight_versions) == (("scripted",), "processed", True)
        for stream in (True, False):
            for session in range(SESSIONS):
                chunks = await sample(client, session, stream=stream)
                assert (ids_of(chunks), logprobs_of(chunks)) == (list(REPLY.ids or ()), EXACT)
                assert (chunks[-1].finish, chunks[-1].versions) == ("stop", (VersionSpan(0, 0, len(EXACT)),))
        places = [places_of(engines, session) for session in range(SESSIONS)]
        assert all(len(place) == 1 for place in places)
        assert len(set[int]().union(*places)) > 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_request(start: Start, stream: bool) -> None:
    async with start(ScriptedReply(ids=REPLY.ids, hold=2)) as (engines, client):
        call = asyncio.create_task(sample(client, 0, stream=stream))
        begun = [asyncio.create_task(engine.journal.requests(1)) for engine in engines]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        call.cancel()
        ended = [asyncio.create_task(engine.journal.over(1)) for engine in engines]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert [entry.outcome for task in done for entry in task.result()] in (["cancelled"], ["aborted"])
        for task in (*begun, *ended):
            task.cancel()


async def test_a_session_goes_on_when_its_server_has_died(start: Start) -> None:
    async with start(REPLY) as (engines, client):
        for session in range(SESSIONS):
            await sample(client, session)
        (dead,) = places_of(engines, 0)
        await engines[dead].__aexit__()
        for session in range(SESSIONS):
            assert ids_of(await sample(client, session)) == list(REPLY.ids or ())
        assert len(places_of(engines, 0)) == 2


FAULTS = {
    "400": (Fault(kind="status", status=400, times=0), EngineRefused, "as the script says"),
    "429": (Fault(kind="status", status=429, retry_after=20, times=0), RateLimited, "as the script says"),
    "cut": (Fault(kind="cut", after=2), EngineUnavailable, "broke off"),
    "error": (Fault(kind="error", after=2), EngineError, "as the script says"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_what_a_server_says_of_a_failure_arrives(start: Start, name: str) -> None:
    fault, error, message = FAULTS[name]
    async with start(ScriptedReply(ids=REPLY.ids, fault=fault)) as (_, client):
        with pytest.raises(error, match=message) as raised:
            await sample(client, 0)
    if isinstance(raised.value, RateLimited):
        assert raised.value.retry_after == 20


async def test_a_prompt_that_is_too_long_is_an_overflow(start: Start) -> None:
    async with start(REPLY) as (_, client):
        with pytest.raises(ContextOverflow):
            await sample(client, 0, tokens=CONTEXT)


async def test_a_push_is_refused_by_name_and_reaches_no_server(start: Start, tmp_path: Path) -> None:
    async with start(REPLY) as (engines, client):
        facts = await client.probe()
        assert not facts.weight_updates
        for change in (client.pause("keep"), client.load_weights(str(tmp_path), 1)):
            with pytest.raises(EngineRefused, match="through a router") as refused:
                await change
            assert all(engine.url in refused.value.message for engine in engines)
        weights = [engine.weights for engine in engines]
        assert [(each.paused, each.loads, each.version) for each in weights] == [(False, 0, "default")] * 4
