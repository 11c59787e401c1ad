"""The ledger's side of a rollout: begins its attempts, reports exactly one terminal state each, and posts rewards.

A subclass runs the attempt: `lifecycle.RolloutRunner` with our own harnesses, `harbor.runner.HarborRunner` with
Harbor's trials. Infrastructure failures are reported to the ledger, which allows a few retries as new attempts with new
keys: by this runner if it opened the group, else by the node that claims the rollout next. `run_groups` opens whole
groups while there is room, and runs every rollout to its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import msgspec

from rolltap.contract.admin import NOTHING_SAMPLED, FinishRollout, NewReward, PolicyOrRoles
from rolltap.contract.rules import SessionRules
from rolltap.errors import (
    BodyTooLarge,
    EvaluatorFailed,
    InvalidRequest,
    LedgerError,
    NoReward,
    RateLimited,
    RolltapError,
    ServerUnreachable,
    SetupTimedOut,
    StoreUnavailable,
)
from rolltap.harnesses.base import (
    Ending,
    Exit,
    Limits,
    Score,
    Transcript,
    Verdict,
    last_line,
    storable,
    storable_detail,
)
from rolltap.harnesses.client import AdminClient, AttemptStatus, ClaimedRollout, OpenedGroup, OpenedSession
from rolltap.tampering import TamperingAct
from rolltap.types import Cause, RolloutStatus, Scoring, Task

log = logging.getLogger("rolltap.runner")

KEY_MARGIN_S = 60.0
"""Seconds for which an agent's key stays valid after its time limit."""

SETTLE_S = 10.0

REPORT_S, REPORT_PAUSE_S = 600.0, 1.0
"""How long the end of a rollout is reported again while the server is away, and the pause between tries, in seconds.
A node whose claim has expired meanwhile is told so."""


class HasName(Protocol):
    @property
    def name(self) -> str: ...


class RolloutWork(Protocol):
    """The properties of one task's rollouts that `AttemptRunner` needs."""

    @property
    def task(self) -> Task: ...

    @property
    def harness(self) -> HasName: ...

    @property
    def evaluator(self) -> HasName: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def rules(self) -> SessionRules: ...


W = TypeVar("W", bound=RolloutWork)


class Stage(StrEnum):
    WAITING = "waiting"
    PREPARE = "prepare"
    RUN = "run"
    EVALUATE = "evaluate"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Progress:
    """A progress report: the rollout has reached `stage`. The last stage has the summary."""

    rollout_id: str
    task_id: str
    stage: Stage
    summary: RolloutSummary | None = None


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """How a rollout ended. `reward` is the sum of its rollout-scope scores, None without an evaluation.

    `seconds` holds the time of each stage, waiting for slots excluded.
    """

    rollout_id: str
    task_id: str
    status: RolloutStatus
    cause: Cause | None
    reward: float | None
    reason: str
    attempt: int
    session_id: str
    seconds: dict[Stage, float]


@dataclass(frozen=True, slots=True)
class Slots:
    """The number of concurrent rollouts in each stage. `ahead` prepared ones may wait for a run slot."""

    prepare: int = 2
    run: int = 8
    evaluate: int = 2
    ahead: int = 2


DEFAULT_SLOTS = Slots()


@dataclass(slots=True)
class RolloutState(Generic[W]):
    """A running rollout. `attempt`: its number in the ledger (0: none). `session`: set when the attempt begins.
    `has_run`: the attempt's agent has ended."""

    claim: ClaimedRollout
    assignment: W
    attempt: int = 0
    session: OpenedSession | None = None
    has_run: bool = False
    seen: Transcript = field(default_factory=Transcript)
    tampering: list[TamperingAct] = field(default_factory=list)
    seconds: dict[Stage, float] = field(default_factory=dict)


class AttemptRunner(ABC, Generic[W]):
    """Runs rollouts that the ledger has opened."""

    def __init__(
        self,
        client: AdminClient,
        slots: Slots = DEFAULT_SLOTS,
        *,
        name: str = "runner",
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.at_once = slots.run
        self.client = client
        self._name = name
        self._progress = progress
        self._leftovers: set[asyncio.Task[None]] = set()
        self._abandoned: set[ClaimedRollout] = set()
        self._alive = asyncio.Semaphore(slots.run + slots.evaluate + slots.ahead)
        self._slots = {
            Stage.PREPARE: asyncio.Semaphore(slots.prepare),
            Stage.RUN: asyncio.Semaphore(slots.run),
            Stage.EVALUATE: asyncio.Semaphore(slots.evaluate),
        }

    async def run(self, claim: ClaimedRollout, assignment: W) -> RolloutSummary:
        """Runs the rollout to its terminal state. A node's rollout may also end pending, for another node to claim.

        Cancelling this call ends the rollout as cancelled, unless `abandon` was called: then other nodes run it.
        """
        state = RolloutState(claim, assignment)
        self._report(state, Stage.WAITING)
        while (summary := await self._try(state)).status is RolloutStatus.PENDING and not claim.token:
            pass
        return summary

    async def _try(self, state: RolloutState[W]) -> RolloutSummary:
        """Runs one attempt and reports its result to the ledger."""
        claim = state.claim
        try:
            async with self._alive:
                state.session, state.seen, state.tampering, state.has_run = None, Transcript(), [], False
                result = await self._attempt(state)
        except LedgerError as error:  # ended elsewhere: cancelled, or claimed by another node
            return await self._ended_elsewhere(state, error)
        except RolltapError as error:
            result = Result.by(error, has_run=state.has_run)
        except asyncio.CancelledError:
            if claim in self._abandoned:
                raise
            with suppress(RolltapError):
                await asyncio.shield(self._finish(state, Result(RolloutStatus.CANCELLED, "cancelled")))
            raise
        except Exception as error:  # a boundary: an unexpected error in one rollout must not end the others
            log.exception("rollout %s, attempt %d", claim.rollout_id, state.attempt)
            reason = f"internal_error: {type(error).__name__}: {error}"
            cause = Cause.EVALUATION if state.has_run else Cause.INFRASTRUCTURE
            result = Result(RolloutStatus.FAILED, reason, cause=cause)
        return await self._finish_patiently(state, result)

    def abandon(self, claim: ClaimedRollout) -> None:
        """Marks the rollout as claimed by another node: if its `run` is cancelled, nothing is reported."""
        self._abandoned.add(claim)

    @abstractmethod
    async def _attempt(self, state: RolloutState[W]) -> Result:
        """Runs one attempt in stages, with `_open` for its session."""

    async def settle(self) -> None:
        """Waits, at most `SETTLE_S` seconds, for the removal of discarded workspaces."""
        if self._leftovers:
            await asyncio.wait(self._leftovers, timeout=SETTLE_S)

    def _report(self, state: RolloutState[W], stage: Stage, summary: RolloutSummary | None = None) -> None:
        self._progress(Progress(state.claim.rollout_id, state.assignment.task.id, stage, summary))

    @asynccontextmanager
    async def _stage(self, state: RolloutState[W], stage: Stage) -> AsyncIterator[None]:
        async with self._slots[stage]:
            self._report(state, stage)
            started = time.monotonic()
            try:
                yield
            finally:
                state.seconds[stage] = time.monotonic() - started

    async def _open(self, state: RolloutState[W]) -> OpenedSession:
        """Begins an attempt. If cancelled, still waits for the attempt's number, which is needed to end the attempt."""
        limits = state.assignment.limits
        ttl = limits.agent_s + KEY_MARGIN_S
        rules = state.assignment.rules
        start = self.client.start_rollout(state.claim, ttl=ttl, runner=self._name, turns=limits.turns, rules=rules)
        starting = asyncio.ensure_future(start)
        try:
            session = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(RolltapError, TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    state.attempt = (await starting).attempt
            raise
        state.session, state.attempt = session, session.attempt
        return session

    async def _finish_patiently(self, state: RolloutState[W], result: Result) -> RolloutSummary:
        """`_finish`, tried again for `REPORT_S` seconds while the server or its store is away: the work is done."""
        deadline = time.monotonic() + REPORT_S
        while True:
            try:
                return await self._finish(state, result)
            except (ServerUnreachable, StoreUnavailable) as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("rollout %s: its end is not reported yet: %s", state.claim.rollout_id, error.message)
                await asyncio.sleep(REPORT_PAUSE_S)

    async def _finish(self, state: RolloutState[W], result: Result) -> RolloutSummary:
        """Posts the rewards, then the terminal state."""
        try:
            try:
                check_scopes(state.session, result.verdict)
                await self._reward(state, result.verdict)
            except EvaluatorFailed as error:
                result = Result.by(error)
            except REFUSED as error:  # an unknown scope
                result = Result.by(EvaluatorFailed(error.message))
            current = await self._report_end(state, result)
        except LedgerError as error:
            return await self._ended_elsewhere(state, error)
        if current.status is not result.status:  # it is tried again, or the ledger has no record of a success
            state.attempt = current.attempt
            return self._summarise(state, replace(result, status=current.status), None)
        scores = result.verdict.scores if result.verdict else ()
        values = [score.value for score in scores if score.scope == "rollout"]
        return self._summarise(state, result, sum(values) if values else None)

    async def _report_end(self, state: RolloutState[W], result: Result) -> AttemptStatus:
        """Reports the terminal state. If the server refuses what is said about it, reports the state alone."""
        end = FinishRollout(
            result.status,
            state.attempt,
            storable(result.reason),
            scoring=result.verdict.scoring if result.verdict else None,
            node_token=state.claim.token,
            cause=result.cause,
            evaluation=str(state.seen),
            tampering=state.tampering,
        )
        try:
            return await self.client.finish_rollout(state.claim.rollout_id, end)
        except REFUSED as error:
            log.warning("rollout %s: its report was refused: %s", state.claim.rollout_id, error.message)
            reason = f"the report was refused: {storable(error.message)}"
            alone = msgspec.structs.replace(end, reason=reason, evaluation="", tampering=())
            return await self.client.finish_rollout(state.claim.rollout_id, alone)

    async def _reward(self, state: RolloutState[W], verdict: Verdict | None) -> None:
        """Appends one reward per scope: the sum of its scores, with the scores in its detail."""
        if verdict is None:
            return
        by_scope: dict[str, list[Score]] = {}
        for score in verdict.scores:
            by_scope.setdefault(score.scope, []).append(score)
        for number, (scope, scores) in enumerate(by_scope.items()):
            own = [score for score in scores if not score.source]
            parts = {"scores": [{"value": score.value, **score.detail} for score in scores]} if len(scores) > 1 else {}
            reward = NewReward(
                state.claim.rollout_id,
                sum(score.value for score in scores),
                scope,
                source=state.assignment.evaluator.name if own else scores[0].source,
                detail=storable_detail({**(verdict.detail if own else {}), **(parts or scores[0].detail)}),
                attempt=state.attempt,
                id=f"{state.claim.rollout_id}-{state.attempt}-{number}",
            )
            await self.client.reward(reward)

    async def _ended_elsewhere(self, state: RolloutState[W], error: LedgerError) -> RolloutSummary:
        """The summary with the ledger's status, after the ledger refused this runner's result."""
        current = await self.client.attempt_status(state.claim.rollout_id)
        state.attempt = current.attempt
        return self._summarise(state, Result(current.status, error.message), None)

    def _summarise(self, state: RolloutState[W], result: Result, reward: float | None) -> RolloutSummary:
        summary = RolloutSummary(
            rollout_id=state.claim.rollout_id,
            task_id=state.assignment.task.id,
            status=result.status,
            cause=result.cause,
            reward=reward,
            reason=result.reason,
            attempt=state.attempt,
            session_id=state.session.session_id if state.session else "",
            seconds=state.seconds,
        )
        self._report(state, Stage.WAITING if result.status is RolloutStatus.PENDING else Stage.ENDED, summary)
        return summary


STATUSES = {
    Ending.DONE: RolloutStatus.SUCCEEDED,
    Ending.LIMIT: RolloutStatus.SUCCEEDED,
    Ending.CRASHED: RolloutStatus.FAILED,
    Ending.TIMED_OUT: RolloutStatus.TIMED_OUT,
    Ending.CANCELLED: RolloutStatus.CANCELLED,
}
"""The status by ending. A rollout whose harness crashed or timed out is still evaluated."""

AWAY = (ServerUnreachable, StoreUnavailable)
REFUSED = (InvalidRequest, BodyTooLarge)

CAUSES = {Ending.CRASHED: Cause.AGENT, Ending.TIMED_OUT: Cause.AGENT}


@dataclass(frozen=True, slots=True)
class Result:
    """The terminal state of a rollout, and its verdict."""

    status: RolloutStatus
    reason: str
    verdict: Verdict | None = None
    cause: Cause | None = None

    @classmethod
    def by(cls, error: RolltapError, *, has_run: bool = False) -> Result:
        """The result of an error that is not the agent's own. Once the agent `has_run`, only a server that is away is
        the infrastructure's doing: all else may come of what the agent left, and is not tried again. After `NoReward`
        it counts 0 in the baseline: who makes the check fail would otherwise be left out of it.
        """
        status = RolloutStatus.TIMED_OUT if isinstance(error, SetupTimedOut) else RolloutStatus.FAILED
        is_evaluations = isinstance(error, EvaluatorFailed) or (has_run and not isinstance(error, AWAY))
        cause = Cause.EVALUATION if is_evaluations else Cause.INFRASTRUCTURE
        nothing = Verdict((Score(0.0),), {"no_reward": error.message}, Scoring.MASKED)
        return cls(status, f"{error.code}: {error.message}", nothing if isinstance(error, NoReward) else None, cause)


def check_scopes(session: OpenedSession | None, verdict: Verdict | None) -> None:
    """Raises `EvaluatorFailed` for a verdict without a reward that the group waits for: it would wait for ever."""
    own = {score.scope for score in verdict.scores} if verdict else set[str]()
    if not own or session is None:
        return
    for scopes in session.reward_scopes:
        if own.isdisjoint(scopes):
            raise EvaluatorFailed(
                f"the evaluator gave no reward of scope {' or '.join(scopes)}, for which the group waits, only of "
                f"{', '.join(sorted(own))}: return one, or leave `rollout` out of the `scopes` of the group's rule"
            )


def unanswered(exit_: Exit) -> Result:
    """The result of a harness that says it is done, though no model answered it: it failed, and is not evaluated."""
    reason = f"{NOTHING_SAMPLED}; the agent ended with exit code {exit_.code}: {last_line(exit_.output)}"
    return Result(RolloutStatus.FAILED, reason, cause=Cause.AGENT)


def reason_of(exit_: Exit) -> str:
    if exit_.ending is Ending.DONE:
        return ""
    code = "" if exit_.code is None else f" (exit code {exit_.code})"
    return f"agent {exit_.ending.value}{code}: {last_line(exit_.output)}"


BACKPRESSURE_WAIT_S = 1.0
"""Seconds to wait if the ledger limits the rate without a `retry_after`."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    group_id: str
    task_id: str
    rollouts: tuple[RolloutSummary, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the rollouts that have one, in order."""
        return tuple(rollout.reward for rollout in self.rollouts if rollout.reward is not None)


async def run_groups(
    runner: AttemptRunner[W],
    assignments: Iterable[W],
    *,
    policy: PolicyOrRoles,
    n: int,
    tags: tuple[str, ...] = (),
) -> list[GroupSummary]:
    """Opens a group of `n` rollouts for each assignment and runs it. Returns the summaries in the assignments' order.

    `assignments` is read while there is room, so it may be a generator that runs until the training ends. While the
    ledger reports too many outstanding groups, no more are opened. Cancelling this call ends every running rollout as
    cancelled.
    """
    room = asyncio.Semaphore(max(2, -(-2 * runner.at_once // n)))
    running: list[asyncio.Task[GroupSummary]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            feed = iter(assignments)
            while True:
                await room.acquire()
                assignment = next(feed, None)
                if assignment is None:
                    break
                group = await _open(runner.client, assignment, policy=policy, n=n, tags=tags)
                task = tasks.create_task(_run_group(runner, group, assignment))
                task.add_done_callback(lambda _: room.release())
                running.append(task)
    except ExceptionGroup as errors:
        raise first_of(errors) from None
    finally:
        await asyncio.shield(runner.settle())
    return [task.result() for task in running]


def first_of(errors: ExceptionGroup) -> Exception:
    """The first error that is not a group itself."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, ExceptionGroup) else first


async def _open(
    client: AdminClient, assignment: RolloutWork, *, policy: PolicyOrRoles, n: int, tags: tuple[str, ...]
) -> OpenedGroup:
    """Opens a group of the assignment's task, with the harness in its spec. Waits while the ledger limits the rate."""
    spec = {"harness": assignment.harness.name, **assignment.task.spec}
    task = replace(assignment.task, spec=spec)
    while True:
        try:
            return await client.open_group(task, policy=policy, n=n, tags=tags)
        except RateLimited as error:
            await asyncio.sleep(error.retry_after or BACKPRESSURE_WAIT_S)


async def _run_group(runner: AttemptRunner[W], group: OpenedGroup, assignment: W) -> GroupSummary:
    async with asyncio.TaskGroup() as tasks:
        rollouts = [tasks.create_task(runner.run(ClaimedRollout(rollout), assignment)) for rollout in group.rollout_ids]
    return GroupSummary(group.id, assignment.task.id, tuple(task.result() for task in rollouts))
