"""The evaluators that a task can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rolltap.decoding import convert
from rolltap.errors import TaskInvalid
from rolltap.extras import lookup
from rolltap.harnesses.evaluators.base import EvaluatorTable
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.environment import EnvironmentCheck
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.llm_judge import LlmJudgeTable
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.evaluators.python_check import PythonTable
from rolltap.harnesses.evaluators.session_completed import SessionCompleted

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
        message = f"the task's evaluator is wrong: {error}; for example {settings.example}"
        raise TaskInvalid(message, param="evaluator") from error
