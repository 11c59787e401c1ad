"""What code that an agent wrote can reach while its reward is made, for each evaluator and runtime.

`rolltap doctor` prints the row of a machine's runtime, docs/security.md has the whole table, and
tests/security/test_boundaries.py tries every cell.
"""

from __future__ import annotations

from enum import StrEnum

from rolltap.harnesses.evaluators.base import CodePlace
from rolltap.harnesses.evaluators.registry import EVALUATORS, evaluator_class
from rolltap.harnesses.runtimes.registry import RUNTIMES

SANDBOXED = ("bubblewrap", "docker", "apptainer")
"""Runtimes with a sandbox for each command, and so with a second one."""
COMMANDS_WITH_MOUNTS = ("harbor",)
"""Evaluators that need a runtime with a file system of its own."""


class Reach(StrEnum):
    """What such code can reach."""

    NONE = "none runs"
    NOTHING = "nothing"
    RESULTS = "the results"
    RUNNER = "the runner"
    REFUSED = "refused"


MEANINGS = {
    Reach.NONE: "no code of the working copy runs",
    Reach.NOTHING: "nothing, run by `$ROLLTAP_SANDBOXED`; else the reward, and the rollout is `unprotected`",
    Reach.RESULTS: "the results, if it is written against pytest or the evaluator; nothing of the runner's",
    Reach.RUNNER: "the reward, and all that the runner's user can",
    Reach.REFUSED: "this runtime can't run the evaluator",
}


def reach(kind: str, runtime: str) -> Reach:
    """What code of the working copy can reach while an evaluator of this kind scores it in this runtime."""
    place, is_sandboxed = evaluator_class(kind).code_place, runtime in SANDBOXED
    if place is CodePlace.NOWHERE:
        return Reach.NONE
    if place is CodePlace.RUNNER:
        return Reach.RUNNER
    if runtime == "thread" or (kind in COMMANDS_WITH_MOUNTS and not is_sandboxed):
        return Reach.REFUSED
    if not is_sandboxed:
        return Reach.RUNNER
    return Reach.NOTHING if place is CodePlace.APART else Reach.RESULTS


def table() -> dict[str, dict[str, Reach]]:
    """Every evaluator of ours by every runtime."""
    return {kind: {runtime: reach(kind, runtime) for runtime in RUNTIMES} for kind in EVALUATORS}


def described(runtime: str) -> str:
    """A runtime's column in a line."""
    by_reach: dict[Reach, list[str]] = {}
    for kind in EVALUATORS:
        by_reach.setdefault(reach(kind, runtime), []).append(kind)
    return "; ".join(f"{', '.join(kinds)}: {each}" for each, kinds in by_reach.items())
