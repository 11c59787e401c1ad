"""A scripted server and a client of it, for the contract of engine clients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rolltap.engine.scripted import ReplyFunction, ScriptedEngine, ScriptedReply, ServedModel, logprob_of, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError, EngineError
from rolltap.extras import known_names, lookup
from rolltap.proxy.engines.base import Engine, SampleChunk, SampleRequest
from rolltap.proxy.engines.registry import ENGINES, ENTRY_POINTS, MakeEngine
from rolltap.proxy.engines.retries import Retries
from rolltap.settings import EngineSettings

STREAMING = {"vllm": "vllm", "vllm-completions": "vllm", "sglang": "sglang", "sglang-incremental": "sglang"}
"""The scripted server's wire, and the client's kind."""


def maker(kind: str) -> MakeEngine:
    return lookup("engine kind", kind, ENGINES, ENTRY_POINTS, ConfigError)


def scripted_wire(kind: str) -> str:
    """The wire of the scripted server that an engine of another package says it speaks."""
    return maker(kind).scripted_wire  # type: ignore[attr-defined]


OUTSIDE = [kind for kind in known_names(ENGINES, ENTRY_POINTS) if kind not in ENGINES]
"""Engines of other packages."""

WIRES = {
    **STREAMING,
    "llamacpp": "llamacpp",
    "tinker": "tinker",
    **{f"{kind}:{scripted_wire(kind)}": kind for kind in OUTSIDE},
}
EXPERTS = {"vllm-experts": "vllm", "sglang": "sglang", "sglang-incremental": "sglang"}
BUDGETS = {"vllm-thinking": "vllm", "vllm-completions-thinking": "vllm"}
MASKS = {"vllm-masks": "vllm", "sglang": "sglang", "sglang-without-masks": "sglang"}

PROMPT = [5, 6, 7, 8]
REPLY = ScriptedReply(ids=(10, 11, 12, 13, 14))


async def collect(sample: Any, request: Any, chunks: list[Any] | None = None, wanted: int = 10_000) -> list[Any]:
    """The first `wanted` chunks of a request, added to `chunks` as they come."""
    taken: list[Any] = [] if chunks is None else chunks

    def take(chunk: Any) -> bool:
        taken.append(chunk)
        return len(taken) < wanted

    await sample(request, take)
    return taken


@dataclass
class World:
    """A scripted server and a client of it."""

    server: ScriptedEngine
    engine: Engine

    def request(self, **fields: Any) -> SampleRequest:
        settings = {"id": "call", "model": "scripted", "prompt_ids": PROMPT, "max_tokens": 100, "session_id": "s"}
        return SampleRequest(**{**settings, **fields})

    async def sample(self, **fields: Any) -> list[SampleChunk]:
        return await collect(self.engine.sample, self.request(**fields))

    async def sample_until_error(self) -> tuple[list[SampleChunk], EngineError | None]:
        """What came, and what ended it."""
        chunks: list[SampleChunk] = []
        try:
            await collect(self.engine.sample, self.request(), chunks)
        except EngineError as error:
            return chunks, error
        return chunks, None


Start = Callable[..., AbstractAsyncContextManager[World]]


def starter(wire: str) -> Start:
    """Starts worlds: the turns that every prompt gets (or a function that says them), and the client's settings."""
    kind: Any = {**WIRES, **EXPERTS, **MASKS, **BUDGETS}[wire]

    @asynccontextmanager
    async def started(
        *turns: ScriptedReply | str | ReplyFunction, context: int = 4096, mode: Any = "processed", **settings: Any
    ):
        script: Any = turns[0] if callable(turns[0]) else say(*turns)  # type: ignore[arg-type]
        served = ServedModel(mode=mode, context=context)
        async with ScriptedEngine(script, FOLDER, wire=wire.rpartition(":")[2], served=served) as server:
            settled = EngineSettings(kind=kind, url=server.url, **settings)
            client = maker(kind)("main", settled, retries=Retries(first_wait_s=0))
            yield World(server, client)
            await client.close()

    return started


def ids_of(chunks: list[SampleChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs_of(chunks: list[SampleChunk]) -> list[float]:
    assert all(chunk.logprobs is not None for chunk in chunks)
    return [value for chunk in chunks for value in chunk.logprobs or ()]


EXACT = [logprob_of(token, at) for at, token in enumerate(REPLY.ids or ())]
