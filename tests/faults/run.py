"""The long fault run: `python -m tests.faults.run`. Prints the table and adds to reports/faults.json.

Worlds run side by side in lanes, each with servers, an engine and a forker of its own: most of a world's time is
waiting. Runs that the report holds are left out; delete it to begin anew. SIGINT and SIGTERM end the run in order.

It fails if an invariant or a scenario's own assertion was violated. The proxy's log of such a run is kept beside the
report.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import rolltap

from .registry import SCENARIOS, Scenario
from .report import Report, Run
from .world import Bench, World

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "reports" / "faults.json"
RUN_LIMIT_S = 1200.0


@dataclass(frozen=True)
class Job:
    scenario: Scenario
    seed: int
    size: int


def jobs(options: argparse.Namespace, done: Report) -> deque[Job]:
    """What is to be run, a seed at a time, without what the report holds."""
    known = {(run.scenario, run.seed) for run in done.runs}
    return deque(
        Job(one, seed, size_of(one, options.kills))
        for seed in options.seeds
        for one in SCENARIOS
        if options.only in one.name and (one.name, seed) not in known
    )


def size_of(scenario: Scenario, kills: int | None) -> int:
    """Kill loops share `kills` of a seed among the stores."""
    loops = [one for one in SCENARIOS if one.run.__name__ == "killed_at_a_point"]
    if kills is None or scenario not in loops:
        return scenario.long
    return max(1, round(kills / len(loops)))


async def once(bench: Bench, job: Job, code: str) -> Run:
    """One run; whatever is wrong with it is its violation."""
    began = time.monotonic()
    world: World | None = None
    violation = ""
    try:
        async with asyncio.timeout(RUN_LIMIT_S), job.scenario.world(bench, job.seed, job.size) as world:
            try:
                await job.scenario.run(world)
                world.assert_no_traceback()
            except BaseException:  # a cancellation by the time limit, too
                log = REPORT.with_name(f"faults-{job.scenario.name}-{job.seed}.log")
                log.write_text(world.proxy.tail(1_000_000))
                raise
    except Exception as error:  # noqa: BLE001 - it is counted, and printed with its scenario and seed
        last = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error) or last.line}"[
            :800
        ]
    counts: Mapping[str, Any] = {} if world is None else world.counts()
    seconds = round(time.monotonic() - began, 2)
    return Run(job.scenario.name, job.seed, code, seconds, violation=violation, **counts)


async def lane(left: deque[Job], report: Report, code: str, began: float) -> None:
    """Runs jobs until none is left. What a run with a violation leaves behind is of no use to the next."""
    bench = Bench()
    try:
        while left:
            job = left.popleft()
            run = await once(bench, job, code)
            report.runs.append(run)
            report.seconds = time.monotonic() - began
            report.write(REPORT)
            said = run.violation or "ok"
            print(f"{len(left):4} left  {run.seconds:6.1f} s  {run.scenario} seed {run.seed}: {said}", flush=True)
            if run.violation:
                await asyncio.to_thread(bench.close)
                bench = Bench()
    finally:
        await asyncio.to_thread(bench.close)


async def run_all(options: argparse.Namespace, report: Report) -> None:
    """Adds to the report until all is run, or a signal says stop."""
    left = jobs(options, report)
    code, began = commit(), time.monotonic() - report.seconds  # as if it had not been stopped
    print(f"{len(left)} runs of {rolltap.__file__} at {code}", flush=True)
    lanes = asyncio.gather(*(lane(left, report, code, began) for _ in range(options.lanes)))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lanes.cancel)
    with suppress(asyncio.CancelledError):
        await lanes


def commit() -> str:
    """The commit that runs, as git says it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def seeds(text: str) -> range:
    """`A..B`, both included."""
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def show(totals: Mapping[str, Any]) -> None:
    table = Table("#", "fault", "runs", "checks", "violations", "recovery s, median / worst", title="Faults")
    for one in totals["rows"]:
        recovery = one["recovery_s"]
        times = f"{recovery['median']:.2f} / {recovery['max']:.2f}" if recovery else ""
        counts = (str(one["runs"]), str(one["checks"]), str(len(one["violations"])))
        table.add_row(str(one["row"]), one["fault"], *counts, times)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=range(1, 21), help="A..B, both included; default 1..20")
    parser.add_argument("--kills", type=int, help="of row 5's loops, all stores together, for each seed; default 51")
    parser.add_argument("--only", default="", help="scenarios whose name has this in it")
    parser.add_argument("--lanes", type=int, default=4, help="worlds at a time")
    options = parser.parse_args()
    REPORT.parent.mkdir(exist_ok=True)
    report = Report.read(REPORT)
    asyncio.run(run_all(options, report))
    totals = report.totals()
    show(totals)
    violations = [text for one in totals["rows"] for text in one["violations"]]
    for text in violations:
        print(text, file=sys.stderr)
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
