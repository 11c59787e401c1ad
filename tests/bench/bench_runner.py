"""The runner's own speed: `python -m tests.bench.bench_runner`. Writes reports/rollouts.json.

A real `rolltap serve` on SQLite in a process of its own, and harnesses that do nothing, so that what is left is the
runner: its overhead a rollout, rollouts a minute in processes and in bubblewrap, the memory of an idle node, and the
share of time in which run slots are busy when an evaluation takes as long as the agent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from rolltap import __version__
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.base import Runtime
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.registry import SessionCompleted
from rolltap.harnesses.runner.attempts import GroupSummary, Progress, RolloutSummary, Slots, Stage, run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import RolloutStatus, Task

from ..conftest import free_port

REPORT = Path("reports") / "rollouts.json"
GROUP = 8
GOALS = {"process": 600, "bubblewrap": 300, "busy": 0.9}
IDLE_S = 3.0
AGENT_S = 0.5
"""How long the agent and the evaluator of the busy-share measurement take."""


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, str]]:
    """A server in its own process; its admin plane's URL and key."""
    config = folder / "rolltap.toml"
    config.write_text(
        f'data = "{folder}"\n[listen]\nagent_port = 0\ntrainer_port = 0\nadmin_port = {(port := free_port())}\n'
        '[engines.none]\nurl = "http://127.0.0.1:9"\n'
        f'[policies.bench]\nengine = "none"\ntokenizer = "{FOLDER}"\nfamily = "qwen3"\n'
    )
    command = [str(Path(sys.executable).parent / "rolltap"), "serve", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_up(url, process))
        yield url, tomllib.loads((folder / "keys.toml").read_text())["admin"]
    finally:
        process.terminate()
        process.wait(15)


async def until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as http:
        while process.poll() is None:
            try:
                async with http.get(url):
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
    raise SystemExit("rolltap serve ended at once; start it by hand to see why")


@dataclass
class Busy:
    """How many rollouts were in the run stage, over time."""

    slots: int
    _now: dict[str, Stage] = field(default_factory=dict)
    _since: float = 0.0
    _first: float = 0.0
    _last_start: float = 0.0
    _area: float = 0.0
    _area_at_last_start: float = 0.0

    def step(self, step: Progress) -> None:
        now = time.monotonic()
        running = sum(stage is Stage.RUN for stage in self._now.values())
        self._first = self._first or (now if step.stage is Stage.RUN else 0.0)
        if self._first:
            self._area += running * (now - (self._since or now))
            self._since = now
        self._now[step.rollout_id] = step.stage
        if step.stage is Stage.RUN:
            self._last_start, self._area_at_last_start = now, self._area

    @property
    def share(self) -> float:
        """Of the time from the first start to the last one: the filling and the emptying of the line are left out."""
        return self._area_at_last_start / ((self._last_start - self._first) * self.slots)


def assignments(runtime: Runtime, rollouts: int, agent: str, evaluator: Any) -> list[Assignment]:
    harness = AnyCommand(("/bin/sh", "-c", agent))
    return [
        Assignment(Task(f"t{number}", "Do nothing."), Files({}), harness, runtime, evaluator)
        for number in range(rollouts // GROUP)
    ]


async def throughput(url: str, key: str, runtime: Runtime, rollouts: int) -> dict[str, float]:
    """Rollouts a minute of a harness that does nothing, and the runner's own time for each."""
    cpu = os.times()
    started = time.monotonic()
    async with AdminClient(url, key) as client:
        groups = await run_groups(
            RolloutRunner(client, Slots(prepare=4, run=8, evaluate=4, ahead=8)),
            assignments(runtime, rollouts, "exit 0", SessionCompleted()),
            policy="bench",
            n=GROUP,
        )
    seconds = time.monotonic() - started
    spent = os.times()
    every = ended(groups)
    own_cpu = (spent.user - cpu.user) + (spent.system - cpu.system)
    return {
        "rollouts": len(every),
        "per_minute": 60 * len(every) / seconds,
        "runner_cpu_ms": 1000 * own_cpu / len(every),
        "run_p50_ms": 1000 * statistics.median(rollout.seconds[Stage.RUN] for rollout in every),
        "prepare_p50_ms": 1000 * statistics.median(rollout.seconds[Stage.PREPARE] for rollout in every),
    }


async def busy_share(url: str, key: str, runtime: Runtime, rollouts: int) -> float:
    """How busy the run slots are when evaluating takes as long as running."""
    slots = Slots(prepare=2, run=4, evaluate=4, ahead=4)
    busy = Busy(slots.run)
    async with AdminClient(url, key) as client:
        jobs = assignments(runtime, rollouts, f"sleep {AGENT_S}", CommandCheck(f"sleep {AGENT_S}"))
        runner = RolloutRunner(client, slots, progress=busy.step)
        ended(await run_groups(runner, jobs, policy="bench", n=GROUP))
    return busy.share


def idle_memory(url: str, key: str) -> float:
    """The resident MB of a `rolltap node` that waits for work."""
    command = [str(Path(sys.executable).parent / "rolltap"), "node"]
    node = subprocess.Popen(
        command, env={**os.environ, "ROLLTAP_ADMIN_URL": url, "ROLLTAP_RUNNER_KEY": key}, stdout=subprocess.PIPE
    )
    try:
        assert node.stdout is not None
        node.stdout.readline()  # it says that it is up
        time.sleep(IDLE_S)
        resident = int(Path(f"/proc/{node.pid}/statm").read_text().split()[1])
        return resident * os.sysconf("SC_PAGE_SIZE") / 1e6
    finally:
        node.terminate()
        node.communicate(timeout=15)


def ended(groups: list[GroupSummary]) -> list[RolloutSummary]:
    every = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in every if rollout.status is not RolloutStatus.SUCCEEDED]
    if failed:
        raise SystemExit(f"{len(failed)} rollouts did not succeed: {failed[0].reason}")
    return every


def measure(rollouts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rolltap-bench-") as name:
        folder = Path(name)
        with server(folder) as (url, key):
            process, bubblewrap = ProcessRuntime(folder / "workspaces"), BubblewrapRuntime(folder / "workspaces")
            return {
                "process": asyncio.run(throughput(url, key, process, rollouts)),
                "bubblewrap": asyncio.run(throughput(url, key, bubblewrap, rollouts)),
                "busy": asyncio.run(busy_share(url, key, process, 64)),
                "idle_mb": idle_memory(url, key),
            }


def report(figures: dict[str, Any]) -> None:
    table = Table("", "rollouts/min", "goal", "runner's CPU a rollout", "set-up p50", "run p50")
    for name in ("process", "bubblewrap"):
        row = figures[name]
        table.add_row(
            name,
            f"{row['per_minute']:.0f}",
            str(GOALS[name]),
            f"{row['runner_cpu_ms']:.1f} ms",
            f"{row['prepare_p50_ms']:.1f} ms",
            f"{row['run_p50_ms']:.1f} ms",
        )
    console = Console()
    console.print(table)
    console.print(f"run slots busy while evaluations take as long as runs: {figures['busy']:.0%} (goal 90%)")
    console.print(f"memory of an idle node: {figures['idle_mb']:.0f} MB")
    REPORT.parent.mkdir(exist_ok=True)
    figures = {**figures, "goals": GOALS, "load": os.getloadavg()}
    machine = {"version": __version__, "python": platform.python_version(), "cores": os.cpu_count()}
    REPORT.write_text(json.dumps({**figures, **machine, "time": datetime.now(UTC).isoformat()}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=400)
    report(measure(parser.parse_args().rollouts))
