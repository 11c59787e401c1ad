"""How many prompt tokens four servers compute anew, by who chooses the server: rolltap, or a real router behind it.

    python -m tests.bench.bench_routers [NAME ...]

The workload of `bench_placement` at an eighth of its tokens: 96 rollouts, 32 at a time. rolltap's engine client sends
each call over HTTP, with its session's header, to four scripted engines or to the router in front of them. What an
engine's cache would have held is computed from its journal, in the order in which the prompts came.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from statistics import fmean

from rolltap.engine.scripted import Entry, Script, ScriptedReply
from rolltap.ids import new_id
from rolltap.proxy.engines.base import Engine, SampleRequest
from rolltap.proxy.engines.registry import open_engine
from rolltap.settings import EngineSettings

from ..engines.routers import install, router, scripted_engines
from . import bench_placement as full
from .bench_placement import Block, Server

SCALE = 8
TOGETHER, ROLLOUTS = 32, 96
SYSTEM, TASK, TURN, REPLY = (size // SCALE for size in (full.SYSTEM, full.TASK, full.TURN, full.REPLY))
BLOCK = full.BLOCK // SCALE
ROOM = full.CACHE * TOGETHER // full.TOGETHER // full.BLOCK
"""Blocks of an engine's cache: as many for each rollout as in `bench_placement`."""
VOCABULARY = range(10, 250)
DELAY_S, TOOL_S = 0.02, 0.05

POLICIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "rolltap": ("vllm", ()),
    **{
        f"vllm-router {policy}": ("vllm", ("--policy", policy))
        for policy in (
            *("consistent_hash", "sticky_least_loaded", "cache_aware"),
            *("round_robin", "random", "power_of_two"),
        )
    },
    **{
        f"sglang-router {name}": ("sglang", ("--policy", *flags))
        for name, flags in {
            "manual": ("manual",),
            "manual, min_load": ("manual", "--assignment-mode", "min_load"),
            **{policy: (policy,) for policy in ("cache_aware", "round_robin", "random", "power_of_two")},
        }.items()
    },
}
"""Kind of the engines, and the router's flags: none is no router."""


def tokens(name: str, count: int) -> list[int]:
    return random.Random(name).choices(VOCABULARY, k=count)


async def roll_out(engine: Engine, number: int) -> None:
    rng = random.Random(number)
    prompt = tokens("system", SYSTEM) + tokens(f"task {number // full.GROUP}", TASK)
    for turn in range(rng.randint(*full.TURNS)):
        prompt += tokens(f"turn {number} {turn}", TURN - REPLY)
        request = SampleRequest(
            id=new_id(), model="scripted", prompt_ids=list(prompt), max_tokens=REPLY, session_id=f"session-{number}"
        )
        reply: list[int] = []
        await engine.sample(request, lambda chunk, reply=reply: reply.extend(chunk.token_ids) or True)
        assert len(reply) == REPLY
        prompt += reply
        await asyncio.sleep(rng.expovariate(1 / TOOL_S))


async def run_all(engine: Engine) -> None:
    waiting = iter(range(ROLLOUTS))

    async def work() -> None:
        for number in waiting:
            await roll_out(engine, number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(TOGETHER):
            tasks.create_task(work())


def blocks_of(prompt: bytes) -> list[Block]:
    """The prompt's whole blocks, each named by all that is before its end."""
    names, state, size = list[Block](), blake2b(digest_size=16), BLOCK * 4
    for start in range(0, len(prompt) - size + 1, size):
        state.update(prompt[start : start + size])
        names.append((state.hexdigest(),))
    return names


def cached_tokens(entries: Sequence[Entry]) -> int:
    """The prompt tokens that one engine's cache would have held, from its journal."""
    server, cached = Server(room=ROOM), 0
    for entry in entries:
        blocks = blocks_of(entry.prompt)
        cached += server.cached(blocks) * BLOCK
        server.keep(blocks)
    return cached


@asynccontextmanager
async def one_url(kind: str, urls: Sequence[str], flags: Sequence[str]) -> AsyncIterator[str]:
    if not flags:
        yield ",".join(urls)
        return
    async with router(kind, urls, *flags) as url:
        yield url


async def measure(kind: str, flags: Sequence[str]) -> tuple[float, float]:
    """The share of prompt tokens that were cached, and the busiest engine's computed tokens over the mean."""
    script = Script(otherwise=ScriptedReply(ids=tuple(tokens("reply", REPLY)), tokens_per_event=REPLY, delay_s=DELAY_S))
    async with scripted_engines(kind, script) as engines, one_url(kind, [each.url for each in engines], flags) as url:
        client = open_engine("main", EngineSettings.model_validate({"kind": kind, "url": url}))
        await run_all(client)
        await client.close()
    asked = [sum(len(entry.prompt) // 4 for entry in engine.journal.entries) for engine in engines]
    cached = [cached_tokens(list(engine.journal.entries)) for engine in engines]
    computed = [all_tokens - held for all_tokens, held in zip(asked, cached, strict=True)]
    return sum(cached) / sum(asked), max(computed) / fmean(computed)


def main() -> None:
    install()
    print("| server chosen by | cached | busiest server over the mean |\n|---|---|---|")
    for name in sys.argv[1:] or POLICIES:
        cached, busiest = asyncio.run(measure(*POLICIES[name]))
        print(f"| {name} | {cached:.1%} | {busiest:.2f} |", flush=True)


if __name__ == "__main__":
    main()
