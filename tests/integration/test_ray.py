"""Rollouts on a real Ray cluster of several nodes, which are killed at random: every rollout ends exactly once."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import secrets
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rolltap.contract.admin import SubmitTasks
from rolltap.types import Task

from .service import ASK, POLICY, Process, Service, end, service, until

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "reports" / "ray_kill.json"
SUBMISSION = "ray"
GROUP = 4


class RayCluster:
    """The cluster of `ray_cluster.py`: a head and nodes that come and go."""

    def __init__(self, log: Path) -> None:
        self.living = 0
        self.killed = 0
        command = [sys.executable, "-m", "tests.integration.ray_cluster"]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.address = self._answer("address")

    def add(self) -> None:
        self.living = int(self._ask("add"))

    def kill(self, chance: random.Random) -> None:
        self.living = int(self._ask(f"kill {chance.randrange(self.living)}"))
        self.killed += 1

    def stop(self) -> None:
        """The whole cluster is gone, as after a power cut."""
        if self._process.poll() is None:
            self._process.communicate("stop\n", timeout=60)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer("done")

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # Ray prints there too
            if line.startswith(f"{word} "):
                return line.split()[1]
        raise AssertionError("the Ray cluster has ended")


@asynccontextmanager
async def ray_cluster(folder: Path) -> AsyncIterator[RayCluster]:
    cluster = await asyncio.to_thread(RayCluster, folder / "ray.log")
    try:
        yield cluster
    finally:
        await asyncio.to_thread(cluster.stop)


def tasks(rollouts: int, seconds: float = 0.0) -> list[Task]:
    """Agents that ask once and then take so many `seconds` more."""
    spec = {
        "harness": "command",
        "argv": ["/usr/bin/python3", "-c", f"{ASK}; import time; time.sleep({seconds})"],
        "evaluator": {"kind": "session_completed"},
    }
    return [Task(f"t{number}", "hi", spec) for number in range(rollouts // GROUP)]


async def progress(home: Service) -> dict[str, Any]:
    async with home.client() as client:
        return await client.get(f"/tasks/{SUBMISSION}")


async def kill_at_random(home: Service, cluster: RayCluster, up: Process, kills: int, every: float) -> None:
    """Once every node has rollouts, kills one every so many seconds, and starts another in its place."""
    chance = random.Random(0)

    async def all_have_work() -> bool:
        assert up.poll() is None, (home.folder / "up.log").read_text()
        return holders(home) > cluster.living or await ended(home)  # the head is a node too

    await until(all_have_work, True)
    while cluster.killed < kills and not (await progress(home))["ended"]:
        await asyncio.to_thread(cluster.kill, chance)
        await asyncio.to_thread(cluster.add)
        await asyncio.sleep(every)


async def ended(home: Service) -> bool:
    return (await progress(home))["ended"]


def holders(home: Service) -> int:
    """How many nodes have claims."""
    with closing(sqlite3.connect(home.folder / "data" / "rolltap.db")) as database:
        return database.execute("SELECT count(DISTINCT node) FROM rollouts WHERE node_token IS NOT NULL").fetchone()[0]


def counts(home: Service, cluster: RayCluster, rollouts: int, seconds: float) -> dict[str, Any]:
    """What the record itself holds."""
    with closing(sqlite3.connect(home.folder / "data" / "rolltap.db")) as database:

        def rows(query: str) -> list[Any]:
            return database.execute(query).fetchall()

        endings = Counter(subject for (subject,) in rows("SELECT subject FROM events WHERE kind = 'rollout_finished'"))
        states = Counter(status for (status,) in rows("SELECT status FROM rollouts"))
        ((attempts,),) = rows("SELECT count(*) FROM attempts")
        ((returned,),) = rows("SELECT count(*) FROM events WHERE kind = 'rollout_returned'")
        ((rewards,),) = rows(
            "SELECT count(*) FROM rewards JOIN rollouts ON rollouts.id = rewards.rollout_id "
            "WHERE rewards.attempt = rollouts.attempt"
        )
        ((still_open,),) = rows("SELECT count(*) FROM sessions WHERE closed_at IS NULL")
    return {
        "rollouts": rollouts,
        "states": dict(states),
        "ended_once": sum(number == 1 for number in endings.values()),
        "ended_twice": sum(number > 1 for number in endings.values()),
        "rewards": rewards,
        "attempts": attempts,
        "returned": returned,
        "open_sessions": still_open,
        "nodes_killed": cluster.killed,
        "seconds": round(seconds, 1),
    }


async def run_and_kill(
    home: Service, rollouts: int, *, kills: int, every: float, seconds: float = 0.0
) -> dict[str, Any]:
    async with ray_cluster(home.folder) as cluster:
        for _ in range(2):
            await asyncio.to_thread(cluster.add)
        up = home.command("up", "--ray", cluster.address, "--slots", "4", log="up.log")
        started = time.monotonic()
        async with home.client() as client:
            await client.submit(SubmitTasks(POLICY, GROUP, tasks(rollouts, seconds), id=SUBMISSION))
        try:
            await kill_at_random(home, cluster, up, kills, every)
            await until(lambda: ended(home), True)
        finally:
            await end(up)
        return counts(home, cluster, rollouts, time.monotonic() - started)


def check(found: dict[str, Any], kills: int) -> None:
    print(found)
    assert found["states"] == {"succeeded": found["rollouts"]}
    assert found["ended_once"] == found["rollouts"]
    assert found["ended_twice"] == 0
    assert found["rewards"] == found["rollouts"]
    assert found["nodes_killed"] == kills
    assert found["returned"] > 0
    assert found["open_sessions"] == 0


@pytest.fixture
async def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    # On a machine with a network the cluster listens there, and `rolltap up` refuses one that has no token.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    async with service(tmp_path) as running:
        yield running


@pytest.mark.acceptance
@pytest.mark.timeout(300)
async def test_nodes_that_die_cost_no_rollout(home: Service) -> None:
    """About 12 CPU seconds: three nodes of Ray start, and each imports the runner."""
    check(await run_and_kill(home, 60, kills=1, every=0.0, seconds=1.5), 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_a_thousand_rollouts_while_nodes_die(home: Service) -> None:
    found = await run_and_kill(home, 1000, kills=12, every=3.0)
    import ray

    machine = {"ray": ray.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps({**found, **machine, "time": datetime.now(UTC).isoformat()}, indent=1))
    check(found, 12)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_losing_the_whole_cluster_costs_only_the_attempts_under_way(home: Service) -> None:
    async with ray_cluster(home.folder) as cluster:
        up = home.command("up", "--ray", cluster.address, "--slots", "2", log="up.log")
        async with home.client() as client:
            await client.submit(SubmitTasks(POLICY, GROUP, tasks(24), id=SUBMISSION))

        async def some_have_ended() -> bool:
            return (await progress(home))["rollouts"].get("succeeded", 0) >= 4

        await until(some_have_ended, True)
        await asyncio.to_thread(cluster.stop)
        await end(up)
        node = home.command("node", "--name", "survivor")
        await until(lambda: ended(home), True)
        await end(node)
        found = counts(home, cluster, 24, 0.0)
    assert found["states"] == {"succeeded": 24}
    assert found["ended_once"] == 24
