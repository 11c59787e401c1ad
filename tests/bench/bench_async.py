"""Our trainer beside TRL's async worker, same groups: `python -m tests.bench.bench_async`. Writes reports/async.json.

Both take the same leases from a trainer plane in memory, in turns, each in a process of its own on one thread, with the
demo's model. A step is lease, loss, gradient, optimiser and push; its CPU and wall seconds are medians over all steps
but each run's first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from rolltap import __version__
from rolltap.contract.trainer import LeasedGroup
from rolltap.demo.learn import POLICY
from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.model.weights import tokenizer_hash

from ..gpu.shapes import Rollouts
from ..learning.steps import GROUPS
from ..unit.trainer_client.making import group, record
from ..unit.trainer_client.plane import KEY, Plane, running

REPORT = Path("reports") / "async.json"
TRAINERS = ("ours", "trl-async")
EACH, VOCABULARY = 8, 512
SHAPES: Mapping[str, Rollouts] = {
    "as the demo's": Rollouts(GROUPS, EACH, prompt=60, turns=3, sampled=16, read=8),
    "longer": Rollouts(GROUPS, EACH, prompt=512, turns=4, sampled=64, read=64),
}


@dataclass(frozen=True)
class Result:
    shape: str
    trainer: str
    tokens: int
    steps: int
    cpu_s: float
    wall_s: float


def groups_of(rollouts: Rollouts, step: int) -> list[LeasedGroup]:
    segments = rollouts.segments(VOCABULARY)
    return [
        group(
            name := f"step-{step}-{at}",
            [record(name, n, segments[at * EACH + n], float(n % 2)) for n in range(EACH)],
            oldest=0,
            newest=0,
        )
        for at in range(GROUPS)
    ]


def seconds(trainer: str, shape: Rollouts, steps: int, out: Path) -> list[tuple[float, float]]:
    """CPU and wall seconds of each step but the first."""
    plane = Plane(policy=POLICY, tokenizer_hash=tokenizer_hash(FOLDER))
    for step in range(steps):
        plane.offer(*groups_of(shape, step))
    with running(plane) as url:
        command = [sys.executable, "-m", "tests.learning.steps", trainer, url, KEY, str(FOLDER), str(out), str(steps)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return [(line["cpu_s"], line["at"] - before["at"]) for before, line in pairwise(lines[1:])]


def measure(steps: int, rounds: int) -> list[Result]:
    results = []
    for name, shape in SHAPES.items():
        tokens = sum(len(one) for segments in shape.segments(VOCABULARY) for one in segments)
        spent: dict[str, list[tuple[float, float]]] = {trainer: [] for trainer in TRAINERS}
        for _ in range(rounds):
            for trainer in TRAINERS:
                with tempfile.TemporaryDirectory() as out:
                    spent[trainer] += seconds(trainer, shape, steps, Path(out) / "run")
        for trainer, found in spent.items():
            cpu, wall = (median(one[at] for one in found) for at in (0, 1))
            results.append(Result(name, trainer, tokens, len(found), cpu, wall))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    results = measure(given.steps, given.rounds)
    table = Table("rows", "trainer", "row tokens", "steps", "CPU s", "over ours", "wall s", "over ours")
    for one in results:
        own = next(other for other in results if other.shape == one.shape)
        ratios = (
            f"{one.cpu_s:.2f}",
            f"{one.cpu_s / own.cpu_s:.2f}",
            f"{one.wall_s:.2f}",
            f"{one.wall_s / own.wall_s:.2f}",
        )
        table.add_row(one.shape, one.trainer, f"{one.tokens:,}", str(one.steps), *ratios)
    Console(width=120).print(table)
    REPORT.parent.mkdir(exist_ok=True)
    about = {"version": __version__, "python": platform.python_version(), "cores": os.cpu_count(), "time": time.time()}
    report = {"results": [asdict(one) for one in results], "load_average_before": load, **about}
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
