"""The harness releases that ran in the test stage of real harnesses, with dates and results.

`scripts/harnesses_page.py` makes `tested.json` from the stage's report: harness → release → run → result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

TABLE = "tested.json"


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """A release and its runs in the stage: the day of the last one, their number, and the number as expected."""

    release: str
    day: str
    runs: int
    passed: int

    @property
    def result(self) -> str:
        return f"{self.passed} of {self.runs}"


@cache
def stage_results() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]:
    """Harness → release → run (protocol and scenario) → its result."""
    return json.loads((files("rolltap.harnesses") / TABLE).read_text(encoding="utf-8"))


def release_results(harness: str) -> list[ReleaseResult]:
    """The releases of `harness` that ran, newest first; empty if it is not a built-in harness."""
    releases = [
        ReleaseResult(
            release, max(run["day"] for run in runs.values()), len(runs), sum(one["passed"] for one in runs.values())
        )
        for release, runs in stage_results().get(harness, {}).items()
    ]
    return sorted(releases, key=lambda result: _order(result.release), reverse=True)


def _order(release: str) -> list[int]:
    return [int(part) for part in release.split(".") if part.isdigit()]
