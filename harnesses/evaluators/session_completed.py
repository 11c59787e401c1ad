"""The `session_completed` evaluator: 1.0 if the harness reports that it finished, else 0.0."""

from __future__ import annotations

from rolltap.harnesses.base import Ending, Evidence, Score, Verdict
from rolltap.harnesses.evaluators.base import EvaluatorTable


class SessionCompleted(EvaluatorTable, tag="session_completed", frozen=True):
    """Trusts the harness's exit code. For smoke tests, and for tasks whose rewards come from elsewhere."""

    example = '{"kind": "session_completed"}'

    async def evaluate(self, evidence: Evidence) -> Verdict:
        done = evidence.exit.ending is Ending.DONE
        return Verdict((Score(float(done)),), {"ending": evidence.exit.ending.value, "code": evidence.exit.code})
