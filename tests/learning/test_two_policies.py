"""Two tiny policies learn together on `pair`: one is the maker, the other the keeper, each paid by its own job and
trained by its own `rolltap train` on the same rollouts. Beside a control whose rewards are shuffled.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from rolltap.demo.learn import FROZEN, POLICIES, POLICY
from rolltap.demo.stack import Process, Stack
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import AdminClient

from .families import FAMILIES, Agent, Play, play
from .table import GROUPS, TRAINER, Run, Shuffle, plays_of

STEPS, HELD_OUT = 6, 48
ENGINES = {"maker": "local", "keeper": "second"}
SERVED = {
    f"{role}{suffix}": {**POLICIES[name], "engine": engine}
    for role, engine in ENGINES.items()
    for suffix, name in (("", POLICY), ("-frozen", FROZEN))
}
"""A policy for each role, of the same name, on an engine of its own, and beside it the one that it is measured with."""


class Two(Run):
    """A run in which each role has a policy."""

    async def by_role(self, plays: list[Play]) -> dict[str, float]:
        """The share of held-out jobs that each policy does as it is."""
        done = await asyncio.gather(*map(self._roles_of, plays))
        return {role: sum(one[role] for one in done) / len(done) for role in ENGINES}

    async def _roles_of(self, one: Play) -> dict[str, float]:
        async with self.slots:
            roles = {role: f"{role}-frozen" for role in ENGINES}
            session = await self.client.open_session(policy="maker-frozen", ttl=300, tags={"roles": json.dumps(roles)})
            endpoint = replace(session.endpoint, roles=dict.fromkeys(roles, 0))
            with tempfile.TemporaryDirectory() as folder:
                return (await play(Agent(self.http, endpoint), one, Path(folder))).roles

    async def train_all(self, trainers: list[Process], plays: Iterator[Play]) -> None:
        await self.train(trainers[0], plays)
        await self.train(trainers[1], plays)


def start(stack: Stack, role: str) -> Process:
    options = {"policy": role, "name": role, "model": stack.model, "out": stack.folder / role, "steps": STEPS}
    options |= {"groups": GROUPS, "max-staleness": 1, "threads": 1}
    return stack.start_trainer(
        [text for name, value in options.items() for text in (f"--{name}", str(value))],
        {f"ROLLTAP_TRAINER__{name}": str(value) for name, value in TRAINER.items()},
    )


async def learned(folder: Path, *, shuffled: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Each policy's held-out success before and after."""
    family = FAMILIES["pair"]
    held_out = family.plays(1000, HELD_OUT, "held_out")
    with Stack(folder, FOLDER, SERVED, more_engines=("second",)) as stack:
        async with AdminClient(stack.admin_url, stack.keys["admin"]) as client, aiohttp.ClientSession() as http:
            shuffle = Shuffle(random.Random(0)) if shuffled else None
            run = Two(stack, client, http, family, shuffle, cast={role: role for role in ENGINES})
            before = await run.by_role(held_out)
            await run.train_all([start(stack, role) for role in ENGINES], plays_of(family, 0))
            return before, await run.by_role(held_out)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_policies_learn_together_and_beat_their_controls(tmp_path: Path) -> None:
    """208 CPU seconds: two runs of six steps, each with two trainers, two engines and a server."""
    for name in ("own", "shuffled"):
        (tmp_path / name).mkdir()
    before, after = asyncio.run(learned(tmp_path / "own", shuffled=False))
    _, control = asyncio.run(learned(tmp_path / "shuffled", shuffled=True))
    print(f"before {before}, after {after}, with shuffled rewards {control}")
    for role in ENGINES:
        assert after[role] > before[role] + 0.15
        assert after[role] > control[role] + 0.15
