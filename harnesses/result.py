"""How a rollout ended, and the cause."""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.contract.admin import NOTHING_SAMPLED
from rolltap.errors import EvaluatorFailed, RolltapError, SetupTimedOut
from rolltap.harnesses.base import Ending, Exit, Verdict
from rolltap.harnesses.output import last_line
from rolltap.types import Cause, RolloutStatus

STATUSES = {
    Ending.DONE: RolloutStatus.SUCCEEDED,
    Ending.LIMIT: RolloutStatus.SUCCEEDED,
    Ending.CRASHED: RolloutStatus.FAILED,
    Ending.TIMED_OUT: RolloutStatus.TIMED_OUT,
    Ending.CANCELLED: RolloutStatus.CANCELLED,
}
"""The status by ending. A rollout whose harness crashed or timed out is still evaluated."""

CAUSES = {Ending.CRASHED: Cause.AGENT, Ending.TIMED_OUT: Cause.AGENT}


@dataclass(frozen=True, slots=True)
class Result:
    """The terminal state of a rollout, and its verdict."""

    status: RolloutStatus
    reason: str
    verdict: Verdict | None = None
    cause: Cause | None = None

    @classmethod
    def by(cls, error: RolltapError) -> Result:
        """The result of an error of the infrastructure or the evaluation, not of the agent."""
        status = RolloutStatus.TIMED_OUT if isinstance(error, SetupTimedOut) else RolloutStatus.FAILED
        cause = Cause.EVALUATION if isinstance(error, EvaluatorFailed) else Cause.INFRASTRUCTURE
        return cls(status, f"{error.code}: {error.message}", cause=cause)


def unanswered(exit_: Exit) -> Result:
    """The result of a harness that says it is done, though no model answered it: it failed, and is not evaluated."""
    reason = f"{NOTHING_SAMPLED}; the agent ended with exit code {exit_.code}: {last_line(exit_.output)}"
    return Result(RolloutStatus.FAILED, reason, cause=Cause.AGENT)


def reason_of(exit_: Exit) -> str:
    if exit_.ending is Ending.DONE:
        return ""
    code = "" if exit_.code is None else f" (exit code {exit_.code})"
    return f"agent {exit_.ending.value}{code}: {last_line(exit_.output)}"
