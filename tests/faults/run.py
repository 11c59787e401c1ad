"""The long fault run: `python -m tests.faults.run`. Prints the table and writes reports/faults.json.

It fails if an invariant or a scenario's own assertion was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rolltap import __version__

from .registry import FAULTS, SCENARIOS, Scenario
from .world import Bench

REPORT = Path(__file__).parents[2] / "reports" / "faults.json"
RUN_LIMIT_S = 300.0
FRESH_ENGINE_AFTER = 3000
"""Requests after which the engine is replaced: its journal is read whole at every check."""


@dataclass
class Tally:
    """What became of a row's runs."""

    runs: int = 0
    checks: int = 0
    calls: int = 0
    kills: int = 0
    recovered: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def as_json(self, row: int) -> dict[str, Any]:
        return {
            "row": row,
            "fault": FAULTS[row],
            "scenarios": [one.name for one in SCENARIOS if one.row == row],
            "runs": self.runs,
            "checks": self.checks,
            "acknowledged_calls": self.calls,
            "violations": self.violations,
            "recovery_s": {"median": statistics.median(self.recovered), "max": max(self.recovered)}
            if self.recovered
            else None,
            "notes": dict(self.notes.most_common()),
        }


async def once(bench: Bench, scenario: Scenario, seed: int, size: int, tally: Tally) -> None:
    """One run; whatever is wrong with it is a violation."""
    tally.runs += 1
    try:
        async with asyncio.timeout(RUN_LIMIT_S), scenario.world(bench, seed, size) as world:
            try:
                await scenario.run(world)
            finally:
                tally.checks += world.checks
                tally.calls += len(world.clients.told.calls)
                tally.recovered += world.recovered
                tally.notes += world.notes
                tally.kills += world.kills
                served = len(await world.journal())
        if served > FRESH_ENGINE_AFTER:
            bench.replace_engine()
    except Exception as error:  # noqa: BLE001 - it is counted, and printed with its scenario and seed
        tally.violations.append(f"{scenario.name} seed {seed}: {type(error).__name__}: {str(error)[:600]}")


def size_of(scenario: Scenario, kills: int | None, seeds: int) -> int:
    """Kill loops share `kills` among stores and seeds."""
    loops = [one for one in SCENARIOS if one.run.__name__ == "killed_at_a_point"]
    if kills is None or scenario not in loops:
        return scenario.long
    return max(1, round(kills / len(loops) / seeds))


def report_of(tallies: Mapping[int, Tally], options: argparse.Namespace, seeds: int, began: float) -> dict[str, Any]:
    """The figures of the `seeds` that are done."""
    return {
        "rows": [tally.as_json(row) for row, tally in sorted(tallies.items())],
        "seeds": seeds,
        "first_seed": options.first_seed,
        "kills": sum(tally.kills for tally in tallies.values()),
        "seconds": round(time.monotonic() - began),
        "rolltap": __version__,
        "sqlite": sqlite3.sqlite_version,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


async def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """The report, which is also written after every seed."""
    began = time.monotonic()
    chosen = [one for one in SCENARIOS if options.only in one.name]
    tallies = {one.row: Tally() for one in chosen}
    report: dict[str, Any] = {}
    bench = Bench()
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("faults", total=options.seeds * len(chosen))
            for done in range(options.seeds):
                seed = options.first_seed + done
                for scenario in chosen:
                    progress.update(task, description=f"{scenario.name} seed {seed}")
                    size = size_of(scenario, options.kills, options.seeds)
                    await once(bench, scenario, seed, size, tallies[scenario.row])
                    progress.advance(task)
                report = report_of(tallies, options, done + 1, began)
                await asyncio.to_thread(REPORT.write_text, json.dumps(report, indent=2))
    finally:
        bench.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--kills", type=int, help="of row 5's loops, all stores and seeds together")
    parser.add_argument("--only", default="", help="scenarios whose name has this in it")
    options = parser.parse_args()
    REPORT.parent.mkdir(exist_ok=True)
    report = asyncio.run(run_all(options))
    table = Table("#", "fault", "runs", "checks", "violations", "recovery s, median / worst", title="Faults")
    for one in report["rows"]:
        recovery = one["recovery_s"]
        times = f"{recovery['median']:.2f} / {recovery['max']:.2f}" if recovery else ""
        counts = (str(one["runs"]), str(one["checks"]), str(len(one["violations"])))
        table.add_row(str(one["row"]), one["fault"], *counts, times)
    Console().print(table)
    violations = [text for one in report["rows"] for text in one["violations"]]
    for text in violations:
        print(text, file=sys.stderr)
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
