"""How many prompt tokens replicas compute anew, by who chooses the replica: a simulation of four, in their own time.

    python -m tests.bench.bench_placement

64 rollouts at a time, 384 in all: groups of 8, a system text of 12,000 tokens that all share, a task of 2,000 that the
group shares, then 10 to 40 turns of 800 tokens. Each replica keeps `CACHE` tokens in blocks of 256, those used last.
`Placement` is the product's; the others are what stands between proxy and engines elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, cast

from rolltap.proxy.engines.base import Engine
from rolltap.proxy.engines.pool import LOAD, Placement, Replicas

REPLICAS, TOGETHER, ROLLOUTS, GROUP = 4, 64, 384, 8
BLOCK, SYSTEM, TASK, TURN, REPLY, TURNS = 256, 12_000, 2_000, 800, 200, (10, 40)
CACHE = 600_000
PREFILL, DECODE, TOOL_S = 20_000, 60, 4.0
"""Tokens a second of a replica, of one reply, and the mean seconds of a tool call."""
SEEDS = range(3)

Block = tuple[str | int, ...]


@dataclass
class Server:
    """A replica's cache of at most `room` blocks, its requests, and the time at which its prefills are done."""

    room: int = CACHE // BLOCK
    blocks: OrderedDict[Block, None] = field(default_factory=OrderedDict)
    running: int = 0
    free_at: float = 0.0

    def cached(self, prompt: Sequence[Block]) -> int:
        return len(list(itertools.takewhile(self.blocks.__contains__, prompt)))

    def keep(self, prompt: Sequence[Block]) -> None:
        for block in reversed(prompt):  # the leading ones are dropped last
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self.room:
            self.blocks.popitem(last=False)


class Ours:
    """The placement of one proxy: it knows its own requests only."""

    def __init__(self) -> None:
        self.replicas = Replicas("main", [cast(Engine, None)] * REPLICAS, probe_every_s=1)
        self.restart()

    def restart(self) -> None:
        self._placement = Placement(self.replicas)

    def choose(self, session: str, prompt: Sequence[Block], servers: Sequence[Server]) -> int:
        return self.replicas.all.index(self._placement.choose(session))

    def count(self, place: int, change: int) -> None:
        self.replicas.all[place].running += change


class RoundRobin:
    def __init__(self) -> None:
        self._next = itertools.cycle(range(REPLICAS))

    def restart(self) -> None: ...

    def choose(self, session: str, prompt: Sequence[Block], servers: Sequence[Server]) -> int:
        return next(self._next)

    def count(self, place: int, change: int) -> None: ...


class PrefixAware(RoundRobin):
    """A router that knows every cache and all requests: the longest cached prefix, where no more than `LOAD` is."""

    def choose(self, session: str, prompt: Sequence[Block], servers: Sequence[Server]) -> int:
        most = LOAD * (sum(server.running for server in servers) + 1) / REPLICAS
        with_room = [place for place, server in enumerate(servers) if server.running < most]
        return max(with_room, key=lambda place: (servers[place].cached(prompt), -servers[place].running))


def prompt_of(rollout: int, turn: int) -> list[Block]:
    parts: list[tuple[Block, int]] = [
        (("system",), SYSTEM),
        (("task", rollout // GROUP), TASK),
        (("turns", rollout), turn * TURN),
    ]
    return [(*name, number) for name, tokens in parts for number in range(tokens // BLOCK)]


def simulate(chooser: type[Any], seed: int, proxies: int, restart_s: float) -> dict[str, float]:
    """The share of prompt tokens that were cached, the wait for the first token, and the busiest replica's load over
    the mean. Each call goes through any of `proxies`, which forget all they know every `restart_s` seconds."""
    rng, servers = random.Random(seed), [Server() for _ in range(REPLICAS)]
    choosers = [chooser() for _ in range(proxies)]
    turns = [rng.randint(*TURNS) for _ in range(ROLLOUTS)]
    number, waiting = itertools.count(), iter(range(ROLLOUTS))
    events: list[tuple[float, int, Any]] = []
    asked = computed = 0
    waits, loads, restarted = list[float](), list[float](), 0.0

    def at(time: float, event: Any) -> None:
        heapq.heappush(events, (time, next(number), event))

    for rollout in itertools.islice(waiting, TOGETHER):
        at(rng.random() * 2, (rollout, 0))
    while events:
        now, _, event = heapq.heappop(events)
        if callable(event):
            event(now)
            continue
        rollout, turn = event
        if restart_s and now - restarted > restart_s:
            restarted = now
            for each in choosers:
                each.restart()
        proxy, prompt = rng.choice(choosers), prompt_of(rollout, turn)
        place = proxy.choose(f"session-{rollout}", prompt, servers)
        server = servers[place]
        server.running += 1
        proxy.count(place, 1)
        fresh = (len(prompt) - server.cached(prompt)) * BLOCK + TURN
        server.keep(prompt)
        asked, computed = asked + len(prompt) * BLOCK + TURN, computed + fresh
        server.free_at = max(now, server.free_at) + fresh / PREFILL
        waits.append(server.free_at - now)
        loads.append(max(each.running for each in servers) * REPLICAS / sum(each.running for each in servers))

        def ended(now: float, rollout: int = rollout, turn: int = turn, place: int = place, proxy: Any = proxy) -> None:
            servers[place].running -= 1
            proxy.count(place, -1)
            if turn + 1 < turns[rollout]:
                at(now + rng.expovariate(1 / TOOL_S), (rollout, turn + 1))
            elif (new := next(waiting, None)) is not None:
                at(now, (new, 0))

        at(server.free_at + REPLY / DECODE, ended)
    waits.sort()
    return {
        "cached": 1 - computed / asked,
        "p50": median(waits),
        "p95": waits[int(len(waits) * 0.95)],
        "load": fmean(loads),
    }


CHOOSERS: dict[str, type[Any]] = {"rolltap": Ours, "round robin": RoundRobin, "prefix-aware router": PrefixAware}
WORLDS = {
    "one proxy": (1, 0.0),
    "one proxy, restarted every minute": (1, 60.0),
    "4 proxies, each call through any": (4, 0.0),
}


def main() -> None:
    lines = [
        "| replica chosen by | cached | first token, p50 / p95 s | busiest replica over the mean |",
        "|---|---|---|---|",
    ]
    for world, (proxies, restart_s) in WORLDS.items():
        for name, chooser in CHOOSERS.items():
            if chooser is not Ours and world != "one proxy":
                continue
            runs = [simulate(chooser, seed, proxies, restart_s) for seed in SEEDS]
            mean = {key: fmean(run[key] for run in runs) for key in runs[0]}
            what = f"{name}: {world}" if chooser is Ours else name
            lines.append(
                f"| {what} | {mean['cached']:.1%} | {mean['p50']:.2f} / {mean['p95']:.2f} | {mean['load']:.2f} |"
            )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
