"""The evaluators that a task can name, and what an agent's code can reach while each one computes its reward.

`rolltap doctor` prints the row of a machine's runtime, docs/security.md has the whole table, and
tests/security/test_boundaries.py tries every cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rolltap.decoding import convert
from rolltap.errors import TaskInvalid
from rolltap.extras import lookup
from rolltap.harnesses.base import Ending, Evidence, Score, Verdict
from rolltap.harnesses.evaluators.base import CodePlace, EvaluatorTable
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.environment import EnvironmentCheck
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.llm_judge import LlmJudgeTable
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.evaluators.python_check import PythonTable
from rolltap.harnesses.runtimes.registry import RUNTIMES
from rolltap.wording import value_problem


class SessionCompleted(EvaluatorTable, tag="session_completed", frozen=True):
    """Trusts the harness's exit code. For smoke tests, and for tasks whose rewards come from elsewhere."""

    example = '{"kind": "session_completed"}'

    async def evaluate(self, evidence: Evidence) -> Verdict:
        done = evidence.exit.ending is Ending.DONE
        return Verdict((Score(float(done)),), {"ending": evidence.exit.ending.value, "code": evidence.exit.code})


EVALUATORS: Mapping[str, type[EvaluatorTable]] = {
    "command": CommandCheck,
    "pytest": PytestCheck,
    "harbor": HarborCheck,
    "python": PythonTable,
    "session_completed": SessionCompleted,
    "llm_judge": LlmJudgeTable,
    "environment": EnvironmentCheck,
}
ENTRY_POINTS = "rolltap.evaluators"


def evaluator_class(kind: str) -> type[EvaluatorTable]:
    return lookup("evaluator", kind, EVALUATORS, ENTRY_POINTS, TaskInvalid)


def parse_evaluator(table: Any) -> EvaluatorTable:
    """Parses a task's `evaluator` table. Raises `TaskInvalid`, with the wrong key."""
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
        message = f"the task needs an `evaluator` with a `kind`; {SessionCompleted.example} is the simplest"
        raise TaskInvalid(message, param="evaluator")
    settings = evaluator_class(table["kind"])
    try:
        return convert(table, settings)
    except msgspec.ValidationError as error:
        message = f"the task's evaluator is wrong: {value_problem(str(error))}; for example {settings.example}"
        raise TaskInvalid(message, param="evaluator") from error


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


REACH_MEANINGS = {
    Reach.NONE: "no code of the working copy runs",
    Reach.NOTHING: "nothing, run by `$ROLLTAP_SANDBOXED`; else the reward, and the rollout is `unprotected`",
    Reach.RESULTS: "the results, if it knows decoys from tests; nothing of the runner's",
    Reach.RUNNER: "the reward, and all that the runner's user can",
    Reach.REFUSED: "this runtime can't run the evaluator",
}


def code_reach(kind: str, runtime: str) -> Reach:
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


def reach_table() -> dict[str, dict[str, Reach]]:
    """Every evaluator of ours by every runtime."""
    return {kind: {runtime: code_reach(kind, runtime) for runtime in RUNTIMES} for kind in EVALUATORS}


def reach_line(runtime: str) -> str:
    """A runtime's column in a line."""
    by_reach: dict[Reach, list[str]] = {}
    for kind in EVALUATORS:
        by_reach.setdefault(code_reach(kind, runtime), []).append(kind)
    return "; ".join(f"{', '.join(kinds)}: {each}" for each, kinds in by_reach.items())
