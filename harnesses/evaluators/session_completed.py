"""The `session_completed` evaluator: 1.0 if the harness says that it finished, else 0.0."""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.harnesses.base import Ending, Evidence, Score, Verdict


@dataclass(frozen=True, slots=True)
class SessionCompleted:
    name: str = "session_completed"
    needs_clean_workspace: bool = False

    async def evaluate(self, evidence: Evidence) -> Verdict:
        done = evidence.exit.ending is Ending.DONE
        return Verdict((Score(float(done)),), {"ending": evidence.exit.ending.value, "code": evidence.exit.code})
