"""What a long run has found so far: `reports/faults.json`, to which every part of a run adds.

A run is one scenario with one seed. What the report holds is not run again, so that a run which was stopped goes on
where it was.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rolltap import __version__

from .registry import FAULTS, SCENARIOS


class Run(msgspec.Struct, frozen=True):
    """One scenario with one seed. `recovered` are seconds; `violation` is empty if all was well."""

    scenario: str
    seed: int
    code: str  # of rolltap and the suite: the commit
    seconds: float
    checks: int = 0
    calls: int = 0
    kills: int = 0
    recovered: list[float] = []
    notes: dict[str, int] = {}
    violation: str = ""


class Report(msgspec.Struct):
    """`seconds` is how long all parts together took."""

    runs: list[Run] = []
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report there, or an empty one."""
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """The runs, and what they come to, for the tables."""
        value = msgspec.to_builtins(self) | self.totals()
        whole = path.with_suffix(".part")
        whole.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
        whole.replace(path)

    def totals(self) -> dict[str, Any]:
        names = {one.name for one in SCENARIOS}
        done = {(run.seed, run.scenario) for run in self.runs}
        seeds = {run.seed for run in self.runs}
        return {
            "rows": [row for number in sorted(FAULTS) if (row := self._row(number))["runs"]],
            "seeds": len(seeds),
            "whole_seeds": sum(all((seed, name) in done for name in names) for seed in seeds),
            "kills": sum(run.kills for run in self.runs),
            "points": dict(self._notes(5).most_common()),
            "codes": sorted({run.code for run in self.runs}),
            "rolltap": __version__,
            "sqlite": sqlite3.sqlite_version,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def of(self, row: int) -> Sequence[Run]:
        names = {one.name for one in SCENARIOS if one.row == row}
        return [run for run in self.runs if run.scenario in names]

    def _notes(self, row: int) -> Counter[str]:
        return sum((Counter(run.notes) for run in self.of(row)), Counter())

    def _row(self, row: int) -> dict[str, Any]:
        runs = self.of(row)
        recovered = [seconds for run in runs for seconds in run.recovered]
        return {
            "row": row,
            "fault": FAULTS[row],
            "runs": len(runs),
            "checks": sum(run.checks for run in runs),
            "acknowledged_calls": sum(run.calls for run in runs),
            "violations": [f"{run.scenario} seed {run.seed}: {run.violation}" for run in runs if run.violation],
            "recovery_s": {"median": statistics.median(recovered), "max": max(recovered)} if recovered else None,
            "notes": dict(self._notes(row).most_common()),
        }
