"""The `python` evaluator: a callable looks at the working copy and returns the reward, or several by scope."""

from __future__ import annotations

import asyncio
import importlib
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rolltap.errors import EvaluatorFailed, TaskInvalid
from rolltap.harnesses.base import Evidence, Score, Verdict
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.base import EvaluatorTable

Check = Callable[[Path], float | Mapping[str, float]]
"""Gets the working copy; returns a number, or numbers by scope: `{"rollout": 1.0, "role:critic": 0.5}`."""


class PythonTable(EvaluatorTable, tag="python", frozen=True):
    """`callable` is the `module:function` of a `Check` on the runner's path."""

    example = '{"kind": "python", "callable": "os.path:getsize"}'

    callable: str

    def build(self, client: AdminClient) -> PythonCheck:
        module, _, name = self.callable.partition(":")
        try:
            return PythonCheck(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise TaskInvalid(f"no callable {self.callable!r} (module:function): {error}", param="evaluator") from error


@dataclass(frozen=True, slots=True)
class PythonCheck:
    """Runs `check` in a thread. An exception in it fails the evaluation, not the runner."""

    check: Check
    name: str = "python"
    needs_clean_workspace: bool = False

    async def evaluate(self, evidence: Evidence) -> Verdict:
        try:
            result = await asyncio.to_thread(self.check, evidence.workspace.folder)
            values = result if isinstance(result, Mapping) else {"rollout": result}
            scores = tuple(Score(float(value), scope) for scope, value in values.items())
        except Exception as error:  # the task's own code: whatever it raises
            evidence.seen.add("the check", traceback.format_exc())
            raise EvaluatorFailed(f"the check raised {type(error).__name__}: {error}") from error
        for score in scores:
            if not math.isfinite(score.value):
                raise EvaluatorFailed(f"the check returned {score.value}; a reward is a finite number")
        return Verdict(scores, {"check": getattr(self.check, "__qualname__", repr(self.check))})
