"""The fault table: every fault that rolltap is to survive, the scenarios that inflict it, and on which store.

A scenario is a function of a `World`; it inflicts, asserts what is special to its fault, and has the world check the
four invariants. `ci` and `long` are its size in `make test-faults` and, for each seed, in `make faults`; 0 leaves it
out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from . import scenarios_client as client
from . import scenarios_crash as crash
from . import scenarios_engine as engine
from . import scenarios_trainer as trainer
from . import stages
from .world import Bench, Stage, World, a_world


@dataclass(frozen=True)
class Scenario:
    row: int
    run: Callable[[World], Awaitable[None]]
    store: str = "sqlite"
    stage: Callable[[Bench], AbstractAsyncContextManager[Stage]] = stages.plain
    ci: int = 1
    long: int = 1

    @property
    def name(self) -> str:
        return f"{self.row:02}-{self.run.__name__}-{self.store}"

    @asynccontextmanager
    async def world(self, bench: Bench, seed: int, size: int) -> AsyncIterator[World]:
        async with self.stage(bench) as stage, a_world(bench, self.store, f"{self.name} {seed}", size, stage) as world:
            yield world


FAULTS = {
    1: "engine answers 429, 500, 503",
    2: "engine hangs",
    3: "engine's stream breaks off at any byte",
    4: "client gone after k frames, every k",
    5: "SIGKILL of the proxy at every named point",
    6: "Postgres stopped with `immediate` under load; spool full",
    7: "Postgres slow, then stalled",
    8: "disk full (16 MB tmpfs)",
    9: "power cut (fsync order by strace)",
    10: "Redis killed and flushed",
    11: "second SQLite writer, readers from outside",
    12: "SDK retries and duplicates",
    13: "parallel and out-of-order calls",
    14: "clock jumps (libfaketime)",
    15: "endless request body",
    16: "request body a byte at a time",
    17: "broken JSON, UTF-8, surrogates",
    18: "garbage and broken streams from the engine",
    19: "huge tool schema, deep JSON",
    20: "log-probs missing",
    21: "NaN log-probs",
    22: "engine saw other tokens",
    23: "trainer killed within a lease",
    24: "poison group",
    25: "zombie agent (SIGSTOP, SIGCONT)",
}

SCENARIOS = (
    Scenario(1, engine.refuses_work),
    Scenario(2, engine.hangs),
    Scenario(3, engine.drops_mid_stream, ci=4, long=10),
    Scenario(4, client.goes_away, ci=18, long=18),
    Scenario(5, crash.killed_at_a_point, "sqlite", ci=12, long=17),
    Scenario(5, crash.killed_at_a_point, "postgres", ci=6, long=17),
    Scenario(5, crash.killed_at_a_point, "redis", ci=6, long=17),
    Scenario(5, crash.spool_survives_a_kill, "postgres"),
    Scenario(6, crash.postgres_crashes, "postgres"),
    Scenario(6, crash.postgres_crashes, "redis"),
    Scenario(6, crash.spool_is_full, "postgres", stages.short_spool),
    Scenario(7, crash.postgres_is_slow, "postgres", stages.slow_postgres, ci=1, long=2),
    Scenario(8, crash.disk_is_full, "sqlite", stages.small_disk),
    Scenario(9, crash.power_is_cut, "sqlite", ci=3, long=5),
    Scenario(10, crash.redis_is_killed, "redis"),
    Scenario(11, crash.second_writer, "sqlite"),
    Scenario(12, client.repeats_itself),
    Scenario(13, client.calls_in_parallel),
    Scenario(14, trainer.clocks_jump, "postgres"),
    Scenario(14, trainer.clocks_jump, "sqlite", ci=0),
    Scenario(15, client.sends_too_much),
    Scenario(16, client.sends_too_slowly),
    Scenario(17, client.sends_nonsense),
    Scenario(18, engine.breaks_its_stream),
    Scenario(18, engine.arrives_in_pieces, "sqlite", stages.split_stream),
    Scenario(19, client.sends_huge_tools),
    Scenario(20, engine.gives_no_logprobs),
    Scenario(21, engine.gives_nan),
    Scenario(22, engine.saw_other_tokens),
    Scenario(23, trainer.trainer_dies, "sqlite"),
    Scenario(23, trainer.trainer_dies, "postgres", ci=0),
    Scenario(24, trainer.trajectory_is_poison),
    Scenario(25, trainer.zombie_returns),
)
