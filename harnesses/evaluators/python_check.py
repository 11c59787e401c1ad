"""The `python` evaluator: a callable looks at the working copy and returns the reward, or several by scope."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rolltap.errors import EvaluatorFailed
from rolltap.harnesses.base import Evidence, Score, Verdict


@dataclass(frozen=True, slots=True)
class PythonCheck:
    """`check(folder)` runs in a thread; what it raises fails the evaluation, not the runner.

    It returns a number, or numbers by scope: `{"rollout": 1.0, "role:critic": 0.5}`.
    """

    check: Callable[[Path], float | Mapping[str, float]]
    name: str = "python"
    needs_clean_workspace: bool = False

    async def evaluate(self, evidence: Evidence) -> Verdict:
        try:
            given = await asyncio.to_thread(self.check, evidence.workspace.folder)
            values = given if isinstance(given, Mapping) else {"rollout": given}
            scores = tuple(Score(float(value), scope) for scope, value in values.items())
        except Exception as error:
            evidence.seen.add("the check", traceback.format_exc())
            raise EvaluatorFailed(f"the check raised {type(error).__name__}: {error}") from error
        for score in scores:
            if not math.isfinite(score.value):
                raise EvaluatorFailed(f"the check returned {score.value}; a reward is a finite number")
        return Verdict(scores, {"check": getattr(self.check, "__qualname__", repr(self.check))})
