"""The life of one rollout: prepare, run, evaluate, tear down; each stage has its own slots.

A slot of one stage never waits for another stage, so a slow test does not block an agent; budgets count the stage's
own time, not the wait for a slot. Every rollout is finished in exactly one terminal state. Failures of the place
(`RuntimeFailed`, `SetupTimedOut`) are retried as new attempts with new keys; failures of the agent are results.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rolltap.errors import EvaluatorFailed, InvalidRequest, LedgerError, RolltapError, RuntimeFailed, SetupTimedOut
from rolltap.harnesses.base import (
    Ending,
    Evaluator,
    Evidence,
    Exit,
    Harness,
    Job,
    Limits,
    Place,
    Runtime,
    Source,
    Verdict,
)
from rolltap.harnesses.client import AdminClient, Held, OpenedSession
from rolltap.harnesses.output import Transcript, last_line
from rolltap.types import Cause, RolloutStatus, Task

log = logging.getLogger("rolltap.runner")

KEY_MARGIN_S = 60.0
"""How much longer than the agent's budget its key lives, in seconds."""

SETTLE_S = 10.0

ENDING_S = 5.0
"""How much longer than its budget an evaluation may last: the time to end what it runs, in seconds."""

STATUSES = {
    Ending.DONE: RolloutStatus.SUCCEEDED,
    Ending.LIMIT: RolloutStatus.SUCCEEDED,
    Ending.CRASHED: RolloutStatus.FAILED,
    Ending.TIMED_OUT: RolloutStatus.TIMED_OUT,
    Ending.CANCELLED: RolloutStatus.CANCELLED,
}
"""A harness that crashed or ran out of time is still evaluated: what it did counts, with its status told."""

CAUSES = {Ending.CRASHED: Cause.AGENT, Ending.TIMED_OUT: Cause.AGENT}


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the rollouts of one task are run with."""

    task: Task
    source: Source
    harness: Harness
    runtime: Runtime
    evaluator: Evaluator
    limits: Limits = field(default_factory=Limits)


class Stage(StrEnum):
    WAITING = "waiting"
    PREPARE = "prepare"
    RUN = "run"
    EVALUATE = "evaluate"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Progress:
    """Rollout `rollout_id` has reached `stage`; the summary comes with the last one."""

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
    """How many rollouts may be in each stage at once; `ahead` prepared ones may wait for a run slot."""

    prepare: int = 2
    run: int = 8
    evaluate: int = 2
    ahead: int = 2


DEFAULT_SLOTS = Slots()


@dataclass(slots=True)
class _Life:
    """What is known of a rollout under way. `session` is the last attempt's, the rest the one's under way."""

    held: Held
    assignment: Assignment
    session: OpenedSession | None = None
    place: Place | None = None
    fresh: asyncio.Task[Place] | None = None
    seen: Transcript = field(default_factory=Transcript)
    seconds: dict[Stage, float] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        """0 while the ledger knows of none."""
        return self.session.attempt if self.session else 0


@dataclass(frozen=True, slots=True)
class _End:
    """How a rollout is to be finished."""

    status: RolloutStatus
    reason: str
    verdict: Verdict | None = None
    cause: Cause | None = None

    @classmethod
    def by(cls, error: RolltapError) -> _End:
        """What an error of ours, not of the agent's, ends it as."""
        status = RolloutStatus.TIMED_OUT if isinstance(error, SetupTimedOut) else RolloutStatus.FAILED
        cause = Cause.EVALUATION if isinstance(error, EvaluatorFailed) else Cause.INFRASTRUCTURE
        return cls(status, f"{error.code}: {error.message}", cause=cause)


class RolloutRunner:
    """Runs rollouts that the ledger has opened. `attempts` bounds the retries of a failing place."""

    def __init__(
        self,
        client: AdminClient,
        slots: Slots = DEFAULT_SLOTS,
        *,
        attempts: int = 3,
        name: str = "runner",
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._attempts = attempts
        self._name = name
        self._progress = progress
        self._leftovers: set[asyncio.Task[None]] = set()
        self._abandoned: set[Held] = set()
        self._alive = asyncio.Semaphore(slots.run + slots.evaluate + slots.ahead)
        self._slots = {
            Stage.PREPARE: asyncio.Semaphore(slots.prepare),
            Stage.RUN: asyncio.Semaphore(slots.run),
            Stage.EVALUATE: asyncio.Semaphore(slots.evaluate),
        }

    async def run(self, held: Held, assignment: Assignment) -> RolloutSummary:
        """Takes the rollout to its terminal state.

        Cancelling this call ends it as cancelled, unless `abandon` was called for it: then it is left to others.
        """
        life = _Life(held, assignment)
        self._tell(life, Stage.WAITING)
        end = _End(RolloutStatus.LOST, "no attempt was made", cause=Cause.INFRASTRUCTURE)
        try:
            for _ in range(self._attempts):
                try:
                    async with self._alive:
                        end = await self._attempt(life)
                    break
                except RuntimeFailed as failure:
                    end = _End.by(failure)
        except LedgerError as refused:  # ended elsewhere: cancelled, or leased to another runner
            return await self._ended_elsewhere(life, refused)
        except RolltapError as error:
            end = _End.by(error)
        except asyncio.CancelledError:
            if held in self._abandoned:
                raise
            with suppress(RolltapError):
                await asyncio.shield(self._finish(life, _End(RolloutStatus.CANCELLED, "cancelled")))
            raise
        except Exception as error:  # a boundary: what surprises one rollout must not end the others
            log.exception("rollout %s, attempt %d", held.rollout_id, life.attempt)
            reason = f"internal_error: {type(error).__name__}: {error}"
            end = _End(RolloutStatus.FAILED, reason, cause=Cause.INFRASTRUCTURE)
        return await self._finish(life, end)

    def abandon(self, held: Held) -> None:
        """The rollout is someone else's now: when its `run` is cancelled, nothing more is said of it."""
        self._abandoned.add(held)

    async def _attempt(self, life: _Life) -> _End:
        assignment = life.assignment
        life.place = life.fresh = None
        life.seen = Transcript()
        try:
            async with self._stage(life, Stage.PREPARE):
                life.place = await self._prepare(assignment)
            async with self._stage(life, Stage.RUN):
                if assignment.evaluator.wants_fresh_place:
                    life.fresh = asyncio.create_task(self._fresh(assignment))
                life.session = await self._open(life)
                exit_ = await self._run_agent(assignment, life.session, life.place)
                if await self._client.close_session(life.session.session_id) and exit_.ending is Ending.CRASHED:
                    exit_ = replace(exit_, ending=Ending.LIMIT)
            async with self._stage(life, Stage.EVALUATE):
                try:
                    verdict = await self._evaluate(life, life.place, exit_)
                except EvaluatorFailed as failure:
                    return _End.by(failure)
            return _End(STATUSES[exit_.ending], _reason(exit_), verdict, CAUSES.get(exit_.ending))
        finally:
            await asyncio.shield(_tear_down(life))

    def _tell(self, life: _Life, stage: Stage, summary: RolloutSummary | None = None) -> None:
        self._progress(Progress(life.held.rollout_id, life.assignment.task.id, stage, summary))

    @asynccontextmanager
    async def _stage(self, life: _Life, stage: Stage) -> AsyncIterator[None]:
        async with self._slots[stage]:
            self._tell(life, stage)
            started = time.monotonic()
            try:
                yield
            finally:
                life.seconds[stage] = time.monotonic() - started

    async def _fresh(self, assignment: Assignment) -> Place:
        async with self._slots[Stage.PREPARE]:
            return await self._prepare(assignment)

    async def _prepare(self, assignment: Assignment) -> Place:
        """A place within the set-up budget; one that comes too late is removed when it comes."""
        making = asyncio.ensure_future(assignment.runtime.prepare(assignment.source))
        try:
            done, _ = await asyncio.wait({making}, timeout=assignment.limits.setup_s)
        except asyncio.CancelledError:
            self._discard(making)
            raise
        if not done:
            self._discard(making)
            raise SetupTimedOut(f"the set-up ran past {assignment.limits.setup_s:g} s")
        return making.result()

    def _discard(self, making: asyncio.Future[Place]) -> None:
        leftover = asyncio.create_task(_close_when_made(making))
        self._leftovers.add(leftover)
        leftover.add_done_callback(self._leftovers.discard)

    async def settle(self) -> None:
        """Waits, `SETTLE_S` seconds at most, for places that are no longer wanted to be removed."""
        if self._leftovers:
            await asyncio.wait(self._leftovers, timeout=SETTLE_S)

    async def _open(self, life: _Life) -> OpenedSession:
        limits = life.assignment.limits
        ttl = limits.agent_s + KEY_MARGIN_S
        return await self._client.start_rollout(life.held, ttl=ttl, runner=self._name, turns=limits.turns)

    async def _run_agent(self, assignment: Assignment, session: OpenedSession, place: Place) -> Exit:
        endpoint = place.endpoint(session.endpoint)
        limits = replace(assignment.limits, turns=session.turns)
        launch = assignment.harness.launch(
            Job(endpoint, assignment.task.instruction, place.workdir, place.home, limits)
        )
        return await place.run(launch, limits, limits.agent_s, reach=session.endpoint.base_url)

    async def _evaluate(self, life: _Life, place: Place, exit_: Exit) -> Verdict:
        evaluator, limits = life.assignment.evaluator, life.assignment.limits
        fresh = life.fresh

        async def fresh_place() -> Place:
            if fresh is None:
                raise EvaluatorFailed(f"the evaluator {evaluator.name!r} did not ask for a fresh place")
            return await fresh

        evidence = Evidence(
            task=life.assignment.task,
            exit=exit_,
            place=place,
            fresh=fresh_place,
            limits=limits,
            session_id=life.session.session_id if life.session else "",
            rollout_id=life.held.rollout_id,
            seen=life.seen,
        )
        try:
            async with asyncio.timeout(limits.evaluate_s + ENDING_S):
                return await evaluator.evaluate(evidence)
        except TimeoutError:
            raise EvaluatorFailed(f"the evaluation ran past {limits.evaluate_s:g} s") from None

    async def _finish(self, life: _Life, end: _End) -> RolloutSummary:
        """Posts the rewards, then the terminal state."""
        try:
            try:
                await self._reward(life, end.verdict)
            except InvalidRequest as refused:  # a scope that is none
                end = _End.by(EvaluatorFailed(refused.message))
            await self._client.finish_rollout(
                life.held,
                end.status,
                attempt=life.attempt,
                reason=end.reason,
                cause=end.cause,
                scoring=end.verdict.scoring if end.verdict else None,
                evaluation=str(life.seen),
            )
        except LedgerError as refused:
            return await self._ended_elsewhere(life, refused)
        scores = end.verdict.scores if end.verdict else ()
        whole = [score.value for score in scores if score.scope == "rollout"]
        return self._summarise(life, end, sum(whole) if whole else None)

    async def _reward(self, life: _Life, verdict: Verdict | None) -> None:
        for number, score in enumerate(verdict.scores if verdict else ()):
            await self._client.reward(
                life.held.rollout_id,
                score.value,
                scope=score.scope,
                source=life.assignment.evaluator.name,
                detail={**(verdict.detail if verdict else {}), **score.detail},
                attempt=life.attempt,
                reward_id=f"{life.held.rollout_id}-{life.attempt}-{number}",
            )

    async def _ended_elsewhere(self, life: _Life, refused: LedgerError) -> RolloutSummary:
        """The ledger has the last word: what this runner did is not counted."""
        found = await self._client.get(f"/rollouts/{life.held.rollout_id}")
        return self._summarise(life, _End(RolloutStatus(found["status"]), refused.message), None)

    def _summarise(self, life: _Life, end: _End, reward: float | None) -> RolloutSummary:
        summary = RolloutSummary(
            rollout_id=life.held.rollout_id,
            task_id=life.assignment.task.id,
            status=end.status,
            cause=end.cause,
            reward=reward,
            reason=end.reason,
            attempt=life.attempt,
            session_id=life.session.session_id if life.session else "",
            seconds=life.seconds,
        )
        self._tell(life, Stage.ENDED, summary)
        return summary


def _reason(exit_: Exit) -> str:
    if exit_.ending is Ending.DONE:
        return ""
    code = "" if exit_.code is None else f" (exit code {exit_.code})"
    return f"agent {exit_.ending.value}{code}: {last_line(exit_.output)}"


async def _close_when_made(making: asyncio.Future[Place]) -> None:
    with suppress(RolltapError):
        await (await making).close()


async def _tear_down(life: _Life) -> None:
    if life.fresh is not None:
        if not life.fresh.done():
            life.fresh.cancel()
        with suppress(asyncio.CancelledError, RolltapError):
            await (await life.fresh).close()
    if life.place is not None:
        await life.place.close()
