"""Trainers side by side on one family of tasks: what they learn, and the processor time that their steps take.

    python -m tests.learning.trainers OUT [--steps 12] [--seeds 1]

Each run is an engine, a proxy and a trainer of its own, as in `table.py`. `reports/trainers.json` is made of them, and
docs/trainers.md of that by `python scripts/tables.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from rolltap.demo.learn import MEASURED_AT, POLICIES
from rolltap.demo.stack import Process, Stack
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import AdminClient

from .families import FAMILIES
from .steps import GROUPS, TRAINERS
from .table import HELD_OUT, ROLLOUTS, Run, plays_of

REPORT = Path(__file__).parents[2] / "reports" / "trainers.json"
FAMILY = FAMILIES["files"]


async def run_trainer(name: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Held-out success before and after, and each step's trained tokens and processor seconds."""
    folder = out / f"{name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    held_out = FAMILY.plays(1000 + seed, HELD_OUT, "held_out")
    with Stack(folder, FOLDER, POLICIES) as stack:
        async with AdminClient(stack.admin_url, stack.keys["admin"]) as client, aiohttp.ClientSession() as http:
            run = Run(stack, client, http, FAMILY, None)
            before = await run.measured(held_out)
            began = time.monotonic()
            await run.train(start(stack, name, steps), plays_of(FAMILY, seed))
            seconds = time.monotonic() - began
            after = await run.measured(held_out)
    lines = [json.loads(line) for line in (folder / "train" / "steps.jsonl").read_text().splitlines()]
    return {"trainer": name, "seed": seed, "before": before, "after": after, "seconds": seconds, "steps": lines[1:]}


def start(stack: Stack, name: str, steps: int) -> Process:
    """The trainer `name` on `stack`."""
    given = (name, stack.trainer_url, stack.keys["trainer"], stack.model, stack.folder / "train", steps)
    command = [sys.executable, "-m", "tests.learning.steps", *map(str, given)]
    trainer = Process.start(name, command, stack.folder, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    stack.processes.append(trainer)
    return trainer


def row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One trainer's runs as a row of the table. Processor time is that of the median step, by trained tokens."""
    steps = [step for run in runs for step in run["steps"]]
    return {
        "trainer": runs[0]["trainer"],
        "runs": len(runs),
        "steps": len(runs[0]["steps"]),
        "before": sum(run["before"] for run in runs) / len(runs),
        "after": sum(run["after"] for run in runs) / len(runs),
        "seconds": sum(run["seconds"] for run in runs) / len(runs),
        "trained_tokens": sum(step["trained_tokens"] for step in steps),
        "cpu_ms_per_1000": 1e6 * median(step["cpu_s"] / step["trained_tokens"] for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in range(asked.seeds):
        for name in TRAINERS:
            runs.append(asyncio.run(run_trainer(name, seed, asked.steps, asked.out.absolute())))
            cpu_s = sum(step["cpu_s"] for step in runs[-1]["steps"])
            print(
                f"{name}, seed {seed}: {runs[-1]['before']:.2f} to {runs[-1]['after']:.2f} in "
                f"{runs[-1]['seconds']:.0f} s, {cpu_s:.1f} s of them the trainer's processor time in its steps",
                flush=True,
            )
    report = {
        "rows": [row([run for run in runs if run["trainer"] == name]) for name in TRAINERS],
        "groups": GROUPS, "rollouts": ROLLOUTS, "held_out": HELD_OUT, "temperature": MEASURED_AT,
        "trl": version("trl"), "cores": os.cpu_count(), "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
