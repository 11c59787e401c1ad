"""`make soak`: the whole deployment, broken for an hour, and checked. `python -m tests.soak.run --seconds N --seed N`.

It runs in rounds of up to 150 seconds, each a deployment of its own: with and without stickiness and Redis in turn,
with faults of four lanes side by side, each lane's in an order that the seed decides. Rounds that `reports/soak.json`
holds for the seed are not run again, so a soak that was stopped goes on; `--anew` forgets them. It fails if a round has
a violation; the deployment's logs of such a round are kept beside the report.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from .checker import check_running, check_stopped
from .injections import LANES, PAUSE_S, PAUSES_S, Inject, needs_redis
from .people import Agents, Submitter, Trainer
from .world import VARIANTS, Variant, World, a_world

REPORT = Path(__file__).parents[2] / "reports" / "soak.json"
ROUND_S = 150.0
CALM_S = 4.0


class PhaseReport(msgspec.Struct):
    name: str
    felt: dict[str, int]


class Round(msgspec.Struct):
    """One deployment. `seconds` is how long clients were at work; after a long `standstill_s` of this machine, clients'
    patience says little."""

    seed: int
    number: int
    variant: str
    seconds: float
    phases: list[PhaseReport]
    totals: dict[str, int]
    violations: list[str]
    standstill_s: float = 0.0


def order_of(lane: str, seed: int, number: int, variant: Variant, only: str = "") -> list[Inject]:
    """The lane's injections in a round, those with `only` in their names. An even round and the next one begin with one
    half of all each; those of Redis belong to the round that has one."""
    order = [one for one in LANES[lane] if only in one.__name__]
    random.Random(f"{lane} {seed} {number // 2}").shuffle(order)
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    mine, others = halves[number % 2], halves[1 - number % 2]
    if variant.redis:
        mine = [*mine, *(one for one in others if needs_redis(one))]
        others = [one for one in others if not needs_redis(one)]
    return [one for one in (*mine, *others) if variant.redis or not needs_redis(one)]


async def run_round(seed: int, number: int, seconds: float, agents: int, only: str = "") -> Round:
    variant = VARIANTS[number % len(VARIANTS)]
    async with a_world(variant, f"{seed} {number}") as world:
        trainer, people, queue = Trainer(world), Agents(world, agents), Submitter(world)
        began = time.monotonic()
        trainer.start()
        working = asyncio.gather(people.run(), queue.run())
        with world.phase("calm"):
            await asyncio.sleep(CALM_S)
        async with asyncio.TaskGroup() as lanes:
            for lane in LANES:
                order = order_of(lane, seed, number, variant, only)
                pause_s = PAUSES_S.get(lane, PAUSE_S)
                lanes.create_task(_break_things(world, trainer, order, pause_s, began + seconds))
        lasted = time.monotonic() - began
        with world.phase("after the last fault"):
            people.stop.set()
            queue.stop.set()
            try:
                async with asyncio.timeout(180):
                    await working
            except TimeoutError:
                world.violated("conversations are stuck 180 s after the last fault")
            await queue.finish(180)
            await trainer.settle(60)
        with world.phase("the end"):
            await check_running(world, trainer)
        await _stop_proxies(world)
        await check_stopped(world, trainer)
        _keep_logs(world, seed, number)
        return Round(
            seed,
            number,
            str(variant),
            round(lasted, 1),
            [PhaseReport(phase.name, dict(phase.felt)) for phase in (*world.phases, world.between)],
            {**world.totals, "seen complete": len(world.told.calls), "groups in effect": len(world.told.acked)},
            world.violations,
            round(world.standstill_s, 1),
        )


async def _break_things(world: World, trainer: Trainer, order: Sequence[Inject], pause_s: float, until: float) -> None:
    """What an injection does to clients within the pause after it belongs to its phase."""
    for inject in itertools.cycle(order):
        if time.monotonic() > until:
            break
        name = inject.__name__.replace("_", " ")
        with world.phase(name):
            world.totals["faults"] += 1
            try:
                await inject(world, trainer)
            except TimeoutError as error:
                world.violated(f"what {name} broke is not whole again: {error}")
            await asyncio.sleep(pause_s)


async def _stop_proxies(world: World) -> None:
    """In order, so that everything is in the store."""
    proxies = [child for name, child in world.deployment.children.items() if name.startswith("proxy")]
    for child in proxies:
        child.wanted = False
        child.signal(signal.SIGTERM)
    for child in proxies:
        if not await asyncio.to_thread(child.wait, 90):
            world.violations.append(f"{child.name} did not stop within 90 s")
    for child in proxies:
        said = child.log.read_text(errors="replace")
        before, found, after = said.partition("Traceback (most recent call last)")
        if found:
            world.violations.append(f"{child.name} printed a traceback: {before[-200:]}{found}{after[:1500]}")


def _keep_logs(world: World, seed: int, number: int) -> None:
    if world.violations:
        REPORT.parent.mkdir(exist_ok=True)
        shutil.copytree(
            world.deployment.folder / "logs", REPORT.with_name(f"soak-{seed}-{number}-logs"), dirs_exist_ok=True
        )


def read(path: Path) -> list[Round]:
    return msgspec.json.decode(path.read_bytes(), type=list[Round]) if path.exists() else []


def write(path: Path, rounds: Sequence[Round]) -> None:
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(rounds), indent=1))
    part.replace(path)


async def soak(seed: int, seconds: float, agents: int, rounds: list[Round], only: str = "") -> None:
    """Appends rounds until those of the seed have taken so many seconds."""
    number = 0
    left = seconds
    while left > 1:
        known = next((one for one in rounds if (one.seed, one.number) == (seed, number)), None)
        if known is None:
            known = await run_round(seed, number, min(left, ROUND_S), agents, only)
            rounds.append(known)
            write(REPORT, rounds)
            said = f"{len(known.violations)} violations" if known.violations else "no violation"
            stood = f"longest standstill {known.standstill_s:.1f} s"
            print(f"round {number}, {known.variant}: {known.seconds:.0f} s, {said}, {stood}", flush=True)
        left -= known.seconds
        number += 1


def show(rounds: Sequence[Round]) -> None:
    """What was injected, how often, and what clients felt, by phase; then the totals."""
    felt: dict[str, Counter[str]] = {}
    times: Counter[str] = Counter()
    for one in rounds:
        for phase in one.phases:
            felt.setdefault(phase.name, Counter()).update(phase.felt)
            times[phase.name] += 1
    table = Table("phase", "times", "calls", "failed a try", "beyond an SDK's", "given up", "broken", title="Soak")
    for name, counts in felt.items():
        broken = sum(count for what, count in counts.items() if what.startswith("broken"))
        figures = (
            counts["calls"],
            counts["failed a try"],
            counts["beyond an SDK's retries"],
            counts["given up"],
            broken,
        )
        table.add_row(name, str(times[name]), *map(str, figures))
    console = Console()
    console.print(table)
    totals = sum((Counter(one.totals) for one in rounds), Counter())
    console.print(", ".join(f"{count} {what}" for what, count in totals.items()))
    for one in rounds:
        for text in one.violations[:50]:
            print(f"seed {one.seed} round {one.number} ({one.variant}): {text}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="how long clients are at work, all rounds together"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agents", type=int, default=50, help="conversations at once")
    parser.add_argument("--only", default="", help="injections with this in their names; seeds of their own, please")
    parser.add_argument("--anew", action="store_true", help="forget what the report holds of this seed")
    options = parser.parse_args()
    rounds = [one for one in read(REPORT) if not options.anew or one.seed != options.seed]
    with suppress(KeyboardInterrupt):
        asyncio.run(soak(options.seed, options.seconds, options.agents, rounds, options.only))
    mine = [one for one in rounds if one.seed == options.seed]
    show(mine)
    sys.exit(any(one.violations for one in mine) or not mine)


if __name__ == "__main__":
    main()
