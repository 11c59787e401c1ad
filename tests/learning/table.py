"""Shows that recipes learn: each on three families of tasks and three seeds, beside a control with shuffled rewards.

    python -m tests.learning.table OUT [--steps 6] [--seeds 3] [--only files]

A cell is an engine, a proxy and a trainer of its own, as a user starts them, and a run of some minutes in the
folder OUT. Each goes into `results.json` beside this file when it ends, and is not run again while it is there;
docs/notes/recipes.md is made of that file by `python scripts/recipes_page.py`. Rows that these seeds do not decide get
five.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import runpy
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.demo.learn import MEASURED_AT, POLICIES, POLICY
from rolltap.demo.stack import Process, Stack
from rolltap.engine.tiny import FOLDER
from rolltap.errors import RateLimited
from rolltap.harnesses.client import AdminClient, ClaimedRollout
from rolltap.types import RolloutStatus, Task

from .families import FAMILIES, Agent, Family, Play, Scores, play

RESULTS = Path(__file__).parent / "results.json"
PAGE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "learning_table.py"))
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {},
    "turn_grpo": {},
    "skill_sd": {},
    "spear": {"groups": 4, "steps": 6, "bonus": False},
    "dr_mas": {},
}
"""Recipes with the options that a run this short needs: SPEAR's replay is whole at its end, and no bonus for calls."""
SEEDS: int = PAGE["SEEDS"]
GROUPS, ROLLOUTS, HELD_OUT, TOGETHER = 8, 8, 64, 16
TRAINER = {
    "LOSS__CLIP_HIGH": 0.6,
    "LOSS__CLIP_DUAL": 3.0,
    "LOSS__KL": 0.0,
    "OPTIMISER__LR": 2e-4,
    "OPTIMISER__EPOCHS": 2,
}
"""The demo's settings, for every recipe alike."""


@dataclass(frozen=True, slots=True)
class Cell:
    family: str
    method: str
    seed: int
    shuffled: bool

    @property
    def name(self) -> str:
        return f"{self.family}-{self.method}-{self.seed}-{'shuffled' if self.shuffled else 'own'}"


def cells(seeds: int) -> Iterator[Cell]:
    """Seed by seed, so that a run that is cut short has whole rows."""
    for seed in range(seeds):
        for method in METHODS:
            for family in FAMILIES.values():
                if method != "dr_mas" or family.roles:
                    yield from (Cell(family.name, method, seed, shuffled) for shuffled in (False, True))


def missing(done: Sequence[Mapping[str, Any]], seeds: int, only: str) -> Iterator[Cell]:
    """The cells that have not run: those of `seeds` seeds, then more seeds of rows that these do not decide."""
    known, open_ = set(map(cell_of, done)), PAGE["undecided"]({"cells": done})
    more = (one for one in cells(PAGE["MORE_SEEDS"]) if (one.family, one.method) in open_)
    for cell in (*cells(seeds), *more):
        if only in ("", cell.family, f"{cell.family}/{cell.method}") and cell not in known:
            yield cell


@dataclass(slots=True)
class Shuffle:
    """The control: every rollout earns what an earlier one did, drawn at random; rewards of calls by their place."""

    random: random.Random
    pool: list[Scores] = field(default_factory=list)

    def __call__(self, own: Scores) -> Scores:
        self.pool = [*self.pool[-31:], own]
        other = self.random.choice(self.pool)
        values = [value for _, value in other.turns]
        turns = [(call, values[index % len(values)]) for index, (call, _) in enumerate(own.turns)]
        return Scores(other.rollout, turns, dict(other.roles))


@dataclass(slots=True)
class Run:
    """One cell while it runs. `success` is the share of jobs really done, a number a group, in order of their ends."""

    stack: Stack
    client: AdminClient
    http: aiohttp.ClientSession
    family: Family
    shuffle: Shuffle | None
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOGETHER))
    success: list[float] = field(default_factory=list)
    cast: Mapping[str, str] | None = None
    """The policy of each role; None: one plays all."""

    async def measured(self, plays: list[Play]) -> float:
        """The share of held-out jobs done by the policy as it is, at the demo's temperature."""
        return sum(await asyncio.gather(*map(self._measured, plays))) / len(plays)

    async def train(self, trainer: Process, plays: Iterator[Play]) -> None:
        """Groups of rollouts until the trainer has ended; the ledger holds new ones back while it has enough."""
        groups: set[asyncio.Task[None]] = set()
        while trainer.child.poll() is None:
            if len(groups) < 4:
                groups.add(asyncio.create_task(self._group(next(plays))))
            ended, groups = await asyncio.wait(groups, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            for group in ended:
                group.result()
        trainer.check()
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)

    async def _group(self, one: Play) -> None:
        task = Task(one.id, one.jobs[0].task.instruction, {"hint": one.hint})
        policy = self.cast or dict.fromkeys(self.family.roles, POLICY) or POLICY
        while True:
            with suppress(RateLimited):
                group = await self.client.open_group(task, policy=policy, n=ROLLOUTS)
                break
            await asyncio.sleep(0.1)
        rewards = await asyncio.gather(*(self._rollout(one, rollout) for rollout in group.rollout_ids))
        self.success.append(sum(rewards) / len(rewards))

    async def _rollout(self, one: Play, rollout: str) -> float:
        async with self.slots:
            session = await self.client.start_rollout(ClaimedRollout(rollout), ttl=300)
            with tempfile.TemporaryDirectory() as folder:
                own = await play(Agent(self.http, session.endpoint), one, Path(folder))
            scores = self.shuffle(own) if self.shuffle else own
            scoped = [("rollout", scores.rollout), *((f"role:{role}", value) for role, value in scores.roles.items())]
            for scope, value in [*scoped, *((f"call:{call}", value) for call, value in scores.turns)]:
                await self.client.reward(NewReward(rollout, value, scope))
            await self.client.finish_rollout(rollout, FinishRollout(RolloutStatus.SUCCEEDED, session.attempt))
        return own.rollout

    async def _measured(self, one: Play) -> float:
        async with self.slots:
            session = await self.client.open_session(policy="tiny-frozen", ttl=300)
            with tempfile.TemporaryDirectory() as folder:
                agent = Agent(self.http, session.endpoint)
                return (await play(agent, one, Path(folder))).rollout


async def run_cell(cell: Cell, steps: int, out: Path, before: float | None = None) -> dict[str, Any]:
    """Held-out success before (measured once a family and seed) and after, and that of the rollouts in between."""
    family, began = FAMILIES[cell.family], time.monotonic()
    held_out = family.plays(1000 + cell.seed, HELD_OUT, "held_out")
    folder = out / "runs" / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shuffle = Shuffle(random.Random(cell.seed)) if cell.shuffled else None
    with Stack(folder, FOLDER, POLICIES) as stack:
        async with AdminClient(stack.admin_url, stack.keys["admin"]) as client, aiohttp.ClientSession() as http:
            run = Run(stack, client, http, family, shuffle)
            if before is None:
                before = await run.measured(held_out)
            await run.train(_trainer(stack, cell, steps), plays_of(family, cell.seed))
            after = await run.measured(held_out)
    shutil.rmtree(folder)
    starts = range(0, min(len(run.success), steps * GROUPS), GROUPS)
    curve = [sum(run.success[at : at + GROUPS]) / len(run.success[at : at + GROUPS]) for at in starts]
    return {
        "family": cell.family, "method": cell.method, "seed": cell.seed, "shuffled": cell.shuffled, "steps": steps,
        "before": before, "after": after, "curve": [round(value, 3) for value in curve],
        "seconds": round(time.monotonic() - began, 1), "time": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def plays_of(family: Family, seed: int) -> Iterator[Play]:
    batch = seed * 100_003
    while True:
        yield from family.plays(batch, GROUPS, "train")
        batch += 1


def _trainer(stack: Stack, cell: Cell, steps: int) -> Process:
    options = {"policy": POLICY, "model": stack.model, "out": stack.folder / "train", "steps": steps, "groups": GROUPS}
    options |= {"recipe": cell.method, "max-staleness": 1, "seed": cell.seed, "threads": 1}
    settings = {**TRAINER, "OPTIONS": json.dumps(METHODS[cell.method])}
    return stack.start_trainer(
        [text for name, value in options.items() for text in (f"--{name}", str(value))],
        {f"ROLLTAP_TRAINER__{name}": str(value) for name, value in settings.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="a family, or FAMILY/METHOD")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["cells"] if RESULTS.exists() else []
    while (cell := next(missing(done, asked.seeds, asked.only), None)) is not None:
        before = next((one["before"] for one in done if (one["family"], one["seed"]) == (cell.family, cell.seed)), None)
        result = asyncio.run(run_cell(cell, asked.steps, asked.out.absolute(), before))
        done = sorted([*done, result], key=lambda one: cell_of(one).name)
        RESULTS.write_text(json.dumps({**head(), "cells": done}, indent=1) + "\n", encoding="utf-8")
        print(f"{cell.name}: {result['before']:.2f} to {result['after']:.2f} in {result['seconds']:.0f} s", flush=True)


def cell_of(result: Mapping[str, Any]) -> Cell:
    return Cell(result["family"], result["method"], result["seed"], result["shuffled"])


def head() -> dict[str, Any]:
    """What all cells have in common, for the page."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    counts = {"groups": GROUPS, "rollouts": ROLLOUTS, "held_out": HELD_OUT, "temperature": MEASURED_AT}
    return {"planned": len(list(cells(SEEDS))), **counts, **machine}


if __name__ == "__main__":
    main()
