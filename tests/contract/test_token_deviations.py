"""vLLM's token streams as servers and gateways write them: the same tokens in any spelling, or an error."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from rolltap.engine.scripted import logprob_of
from rolltap.engine.vllm_http import ScoredToken, completion, completion_choice, generate_choice, usage
from rolltap.errors import EngineError, EngineProtocolError, EngineUnavailable
from rolltap.proxy.engines.base import SampleChunk, SampleRequest
from rolltap.proxy.engines.retries import Retries
from rolltap.proxy.engines.vllm import VllmEngine
from rolltap.settings import EngineSettings

from .engine_world import PROMPT, collect, ids_of, logprobs_of

IDS = [10, 11, 12, 13, 14, 15]
VALUES = [logprob_of(token, at) for at, token in enumerate(IDS)]
ROUTES = ("/inference/v1/generate", "/v1/completions")
SEEDS = 60


@dataclass
class TokenServer:
    """A server that answers a sampling request on `route` with `pieces`, and the other route with 404."""

    route: str
    pieces: Sequence[bytes] = ()
    head: str = "content-type: text/event-stream"
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
        status, pieces = ("200 OK", self.pieces) if head.split()[1] == self.route else ("404 Not Found", [b"{}"])
        writer.write(f"HTTP/1.1 {status}\r\n{self.head}\r\nconnection: close\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        await writer.drain()
        writer.close()


@pytest.fixture(params=ROUTES)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[TokenServer]:
    served = TokenServer(request.param)
    listening = await asyncio.start_server(served.handle, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield served


async def sampled(server: TokenServer) -> tuple[list[SampleChunk], EngineError | None]:
    """What came, and what ended it."""
    client = VllmEngine("main", EngineSettings(kind="vllm", url=server.url), retries=Retries(first_wait_s=0))
    chunks: list[SampleChunk] = []
    try:
        await collect(client.sample, SampleRequest("call", "m", PROMPT, 100), chunks)
    except EngineError as error:
        return chunks, error
    finally:
        await client.close()
    return chunks, None


def event(route: str, ids: Sequence[int] | None, start: int, finish: str | None) -> dict[str, Any]:
    scored = None if ids is None else [ScoredToken(id, VALUES[start + at]) for at, id in enumerate(ids)]
    if route == ROUTES[0]:
        return {"request_id": "call", "choices": [generate_choice(0, ids, scored, finish)]}  # type: ignore[arg-type]
    return completion("call", "m", [completion_choice(0, "", scored, finish, token_ids=ids)])


def events_of(chance: random.Random, route: str) -> list[dict[str, Any]]:
    """The output in pieces; the finish with the last tokens, or alone; empty pieces among them."""
    edges = sorted({0, len(IDS), *(chance.randrange(len(IDS)) for _ in range(3))})
    events = [event(route, IDS[start:end], start, None) for start, end in pairwise(edges)]
    for place in (0, chance.randrange(len(events))):
        if chance.random() < 0.4:
            events.insert(place, event(route, chance.choice(([], None)), 0, None))
    if chance.random() < 0.5:
        events.append(event(route, chance.choice(([], None)), 0, "stop"))
    else:
        last = next(each for each in reversed(events) if each["choices"][0]["token_ids"])
        del events[events.index(last) + 1 :]
        last["choices"][0]["finish_reason"] = "stop"
    counts = usage(len(PROMPT), len(IDS))
    if chance.random() < 0.3:
        events[-1]["usage"] = counts
    else:
        events.append({"choices": chance.choice(([], None)), "usage": counts})
    return events


def written(chance: random.Random, events: Sequence[dict[str, Any]]) -> list[bytes]:
    """The events as a stream, cut anywhere: comments, other fields, either line end, with or without `[DONE]`."""
    end = chance.choice(("\n", "\r\n"))
    lines: list[str] = []
    for each in events:
        lines += [": keep-alive", ""] * (chance.random() < 0.3) + ["event: message"] * (chance.random() < 0.2)
        lines += [chance.choice(("data: ", "data:")) + json.dumps(each), ""]
    lines += ["data: [DONE]", ""] * (chance.random() < 0.6)
    body = "".join(line + end for line in lines).encode()
    edges = sorted({0, len(body), *(chance.randrange(len(body)) for _ in range(chance.randrange(4)))})
    return [body[start:stop] for start, stop in pairwise(edges)]


async def test_any_spelling_gives_the_same_tokens(server: TokenServer) -> None:
    for seed in range(SEEDS):
        chance = random.Random(seed)
        server.pieces = written(chance, events_of(chance, server.route))
        chunks, error = await sampled(server)
        assert error is None, (seed, error)
        assert (ids_of(chunks), logprobs_of(chunks)) == (IDS, VALUES), seed
        assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"], seed


@pytest.mark.parametrize("fault", ["twice", "lost", "error", "no finish"])
async def test_a_broken_stream_is_an_error(server: TokenServer, fault: str) -> None:
    for seed in range(SEEDS // 3):
        chance = random.Random(seed)
        events = events_of(chance, server.route)
        full = [at for at, each in enumerate(events) if each["choices"] and each["choices"][0]["token_ids"]]
        at = chance.choice(full)
        if fault == "twice":
            again = json.loads(json.dumps(events[at]))
            again["choices"][0]["finish_reason"] = None
            events.insert(at, {**again, "usage": None})
        elif fault == "lost":
            events[at]["choices"][0] |= {"token_ids": [], "logprobs": None}
        elif fault == "error":
            events.insert(at + 1, {"error": {"message": "out of memory", "code": 500}})
            events[at]["choices"][0]["finish_reason"] = None
        else:
            for each in events:
                for choice in each["choices"] or ():
                    choice["finish_reason"] = None
        server.pieces = written(chance, events)
        _, error = await sampled(server)
        assert isinstance(error, EngineUnavailable if fault == "error" else EngineProtocolError), (seed, error)


async def test_missing_log_probs_are_not_made_up(server: TokenServer) -> None:
    for seed in range(SEEDS // 3):
        chance = random.Random(seed)
        events = events_of(chance, server.route)
        full = [each for each in events if each["choices"] and each["choices"][0]["token_ids"]]
        logprobs = chance.choice(full)["choices"][0]["logprobs"]
        logprobs["content" if server.route == ROUTES[0] else "token_logprobs"].pop()
        server.pieces = written(chance, events)
        chunks, error = await sampled(server)
        assert (ids_of(chunks), error) == (IDS, None)
        assert any(chunk.logprobs is None for chunk in chunks)


async def test_a_compressed_answer_is_named(server: TokenServer) -> None:
    chance = random.Random(0)
    server.head += "\r\ncontent-encoding: gzip"
    server.pieces = [gzip.compress(b"".join(written(chance, events_of(chance, server.route))))]
    _, error = await sampled(server)
    assert isinstance(error, EngineProtocolError)
    assert "gzip" in error.message
