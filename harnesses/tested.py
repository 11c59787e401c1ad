"""Which releases of which harnesses ran in the stage of real harnesses, when, and with what result.

`tested.json` is made from the stage's report by `scripts/harnesses_page.py`: harness → release → run → result.
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
    """A release and its runs in the stage: the last one's day, how many there are, and how many went as expected."""

    release: str
    day: str
    runs: int
    passed: int

    @property
    def result(self) -> str:
        return f"{self.passed} of {self.runs}"


@cache
def stage_results() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]:
    """Harness → release → run (protocol and scenario) → what came of it."""
    return json.loads((files("rolltap.harnesses") / TABLE).read_text(encoding="utf-8"))


def release_results(harness: str) -> list[ReleaseResult]:
    """The releases of `harness` that ran, the newest first; none for a harness that is not ours."""
    releases = [
        ReleaseResult(
            release, max(run["day"] for run in runs.values()), len(runs), sum(one["passed"] for one in runs.values())
        )
        for release, runs in stage_results().get(harness, {}).items()
    ]
    return sorted(releases, key=lambda tested: _order(tested.release), reverse=True)


def _order(release: str) -> list[int]:
    return [int(part) for part in release.split(".") if part.isdigit()]
