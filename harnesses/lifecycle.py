"""Runs one rollout: prepare, run, evaluate, tear down. Each stage has its own slots.

A slot of one stage never waits for another stage, so a slow test does not block an agent. Time limits count a stage's
own time, not the wait for a slot. Every rollout ends in exactly one terminal state. Failures of the agent are results.
Failures of the infrastructure are reported to the ledger, which allows a few retries as new attempts with new keys: by
this runner if it opened the group, else by the node that claims the rollout next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.errors import EvaluatorFailed, InvalidRequest, LedgerError, RolltapError, SetupTimedOut
from rolltap.harnesses.base import (
    Ending,
    Evaluator,
    Evidence,
    Exit,
    Harness,
    Job,
    Limits,
    Runtime,
    Score,
    Source,
    Verdict,
    Workspace,
)
from rolltap.harnesses.client import AdminClient, ClaimedRollout, OpenedSession
from rolltap.harnesses.logs.check import check_log
from rolltap.harnesses.output import Transcript
from rolltap.harnesses.result import CAUSES, STATUSES, Result, reason_of
from rolltap.harnesses.tampering import Look, look_at
from rolltap.tampering import TamperingAct, TamperingKind
from rolltap.types import Cause, RolloutStatus, Task

log = logging.getLogger("rolltap.runner")

KEY_MARGIN_S = 60.0
"""Seconds for which an agent's key is valid after its time limit."""

SETTLE_S = 10.0

ENDING_S = 5.0
"""Seconds for an evaluation to end its processes after its time limit."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The task, harness, runtime and evaluator of rollouts."""

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
class RolloutState:
    """A running rollout. `attempt` is its number in the ledger (0: none); `session` is set once the attempt began."""

    claim: ClaimedRollout
    assignment: Assignment
    attempt: int = 0
    session: OpenedSession | None = None
    workspace: Workspace | None = None
    clean: asyncio.Task[Workspace] | None = None
    seen: Transcript = field(default_factory=Transcript)
    tampering: list[TamperingAct] = field(default_factory=list)
    seconds: dict[Stage, float] = field(default_factory=dict)


class RolloutRunner:
    """Runs rollouts that the ledger has opened."""

    def __init__(
        self,
        client: AdminClient,
        slots: Slots = DEFAULT_SLOTS,
        *,
        name: str = "runner",
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._client = client
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

    async def run(self, claim: ClaimedRollout, assignment: Assignment) -> RolloutSummary:
        """Runs the rollout to its terminal state. A node's rollout may also end pending, for another node to claim.

        Cancelling this call ends the rollout as cancelled, unless `abandon` was called: then other nodes run it.
        """
        state = RolloutState(claim, assignment)
        self._report(state, Stage.WAITING)
        while (summary := await self._try(state)).status is RolloutStatus.PENDING and not claim.token:
            pass
        return summary

    async def _try(self, state: RolloutState) -> RolloutSummary:
        """Runs one attempt and reports its result to the ledger."""
        claim = state.claim
        try:
            async with self._alive:
                result = await self._attempt(state)
        except LedgerError as refused:  # ended elsewhere: cancelled, or leased to another runner
            return await self._ended_elsewhere(state, refused)
        except RolltapError as error:
            result = Result.by(error)
        except asyncio.CancelledError:
            if claim in self._abandoned:
                raise
            with suppress(RolltapError):
                await asyncio.shield(self._finish(state, Result(RolloutStatus.CANCELLED, "cancelled")))
            raise
        except Exception as error:  # a boundary: an unexpected error in one rollout must not end the others
            log.exception("rollout %s, attempt %d", claim.rollout_id, state.attempt)
            reason = f"internal_error: {type(error).__name__}: {error}"
            result = Result(RolloutStatus.FAILED, reason, cause=Cause.INFRASTRUCTURE)
        return await self._finish(state, result)

    def abandon(self, claim: ClaimedRollout) -> None:
        """Notes that another node has the rollout now: when its `run` is cancelled, nothing is reported."""
        self._abandoned.add(claim)

    async def _attempt(self, state: RolloutState) -> Result:
        assignment = state.assignment
        state.session = state.workspace = state.clean = None
        state.seen, state.tampering = Transcript(), []
        try:
            async with self._stage(state, Stage.PREPARE):
                state.workspace = await self._prepare(assignment)
            async with self._stage(state, Stage.RUN):
                if assignment.evaluator.needs_clean_workspace:
                    state.clean = asyncio.create_task(self._prepare_clean(assignment))
                before = await _look(assignment, state.workspace)
                state.session = await self._open(state)
                state.attempt = state.session.attempt
                exit_ = await self._run_agent(assignment, state.session, state.workspace)
                if await self._client.close_session(state.session.session_id) and exit_.ending is Ending.CRASHED:
                    exit_ = replace(exit_, ending=Ending.LIMIT)
                await check_log(self._client, state.session, assignment.harness, state.workspace, exit_)
            async with self._stage(state, Stage.EVALUATE):
                state.tampering = (await _look(assignment, state.workspace)).acts_since(before)
                if exit_.excess:
                    state.tampering.append(TamperingAct.at(TamperingKind.LIMITS, exit_.excess))
                try:
                    verdict = await self._evaluate(state, state.workspace, exit_)
                except EvaluatorFailed as failure:
                    return Result.by(failure)
            return Result(STATUSES[exit_.ending], reason_of(exit_), verdict, CAUSES.get(exit_.ending))
        finally:
            await asyncio.shield(_tear_down(state))

    def _report(self, state: RolloutState, stage: Stage, summary: RolloutSummary | None = None) -> None:
        self._progress(Progress(state.claim.rollout_id, state.assignment.task.id, stage, summary))

    @asynccontextmanager
    async def _stage(self, state: RolloutState, stage: Stage) -> AsyncIterator[None]:
        async with self._slots[stage]:
            self._report(state, stage)
            started = time.monotonic()
            try:
                yield
            finally:
                state.seconds[stage] = time.monotonic() - started

    async def _prepare_clean(self, assignment: Assignment) -> Workspace:
        async with self._slots[Stage.PREPARE]:
            return await self._prepare(assignment)

    async def _prepare(self, assignment: Assignment) -> Workspace:
        """Creates a workspace within the set-up time limit. One that is ready too late is removed."""
        preparing = asyncio.ensure_future(assignment.runtime.prepare(assignment.source))
        try:
            done, _ = await asyncio.wait({preparing}, timeout=assignment.limits.setup_s)
        except asyncio.CancelledError:
            self._discard(preparing)
            raise
        if not done:
            self._discard(preparing)
            raise SetupTimedOut(f"the set-up ran past {assignment.limits.setup_s:g} s")
        return preparing.result()

    def _discard(self, preparing: asyncio.Future[Workspace]) -> None:
        leftover = asyncio.create_task(_close_when_prepared(preparing))
        self._leftovers.add(leftover)
        leftover.add_done_callback(self._leftovers.discard)

    async def settle(self) -> None:
        """Waits, `SETTLE_S` seconds at most, for workspaces that are no longer wanted to be removed."""
        if self._leftovers:
            await asyncio.wait(self._leftovers, timeout=SETTLE_S)

    async def _open(self, state: RolloutState) -> OpenedSession:
        """Begins an attempt. Where this is cancelled it still learns the attempt's number: only that can be ended."""
        limits = state.assignment.limits
        ttl = limits.agent_s + KEY_MARGIN_S
        start = self._client.start_rollout(state.claim, ttl=ttl, runner=self._name, turns=limits.turns)
        starting = asyncio.ensure_future(start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(RolltapError, TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    state.attempt = (await starting).attempt
            raise

    async def _run_agent(self, assignment: Assignment, session: OpenedSession, workspace: Workspace) -> Exit:
        endpoint = workspace.endpoint(session.endpoint)
        limits = replace(assignment.limits, turns=session.turns)
        job = Job(endpoint, assignment.task.instruction, workspace.workdir, workspace.home, limits)
        launch = assignment.harness.launch(job)
        return await workspace.run(launch, limits, limits.agent_s, reach=session.endpoint.base_url)

    async def _evaluate(self, state: RolloutState, workspace: Workspace, exit_: Exit) -> Verdict:
        evaluator, limits = state.assignment.evaluator, state.assignment.limits
        clean = state.clean

        async def clean_workspace() -> Workspace:
            if clean is None:
                raise EvaluatorFailed(f"the evaluator {evaluator.name!r} did not ask for a clean workspace")
            return await clean

        evidence = Evidence(
            task=state.assignment.task,
            exit=exit_,
            workspace=workspace,
            clean_workspace=clean_workspace,
            limits=limits,
            session_id=state.session.session_id if state.session else "",
            rollout_id=state.claim.rollout_id,
            harness=state.assignment.harness.name,
            seen=state.seen,
        )
        try:
            async with asyncio.timeout(limits.evaluate_s + ENDING_S):
                return await evaluator.evaluate(evidence)
        except TimeoutError:
            raise EvaluatorFailed(f"the evaluation ran past {limits.evaluate_s:g} s") from None

    async def _finish(self, state: RolloutState, result: Result) -> RolloutSummary:
        """Posts the rewards, then the terminal state."""
        try:
            try:
                await self._reward(state, result.verdict)
            except InvalidRequest as refused:  # an unknown scope
                result = Result.by(EvaluatorFailed(refused.message))
            end = FinishRollout(
                result.status,
                state.attempt,
                result.reason,
                scoring=result.verdict.scoring if result.verdict else None,
                node_token=state.claim.token,
                cause=result.cause,
                evaluation=str(state.seen),
                tampering=state.tampering,
            )
            standing = await self._client.finish_rollout(state.claim.rollout_id, end)
        except LedgerError as refused:
            return await self._ended_elsewhere(state, refused)
        if standing.status is RolloutStatus.PENDING:
            state.attempt = standing.attempt
            return self._summarise(state, replace(result, status=standing.status), None)
        scores = result.verdict.scores if result.verdict else ()
        whole = [score.value for score in scores if score.scope == "rollout"]
        return self._summarise(state, result, sum(whole) if whole else None)

    async def _reward(self, state: RolloutState, verdict: Verdict | None) -> None:
        """Appends one reward per scope: the sum of its scores, with the scores in its detail."""
        by_scope: dict[str, list[Score]] = {}
        for score in verdict.scores if verdict else ():
            by_scope.setdefault(score.scope, []).append(score)
        for number, (scope, scores) in enumerate(by_scope.items()):
            parts = {"scores": [{"value": score.value, **score.detail} for score in scores]} if len(scores) > 1 else {}
            reward = NewReward(
                state.claim.rollout_id,
                sum(score.value for score in scores),
                scope,
                source=state.assignment.evaluator.name,
                detail={**(verdict.detail if verdict else {}), **(parts or scores[0].detail)},
                attempt=state.attempt,
                id=f"{state.claim.rollout_id}-{state.attempt}-{number}",
            )
            await self._client.reward(reward)

    async def _ended_elsewhere(self, state: RolloutState, refused: LedgerError) -> RolloutSummary:
        """The summary with the ledger's status, after it has refused this runner's result."""
        standing = await self._client.rollout_standing(state.claim.rollout_id)
        state.attempt = standing.attempt
        return self._summarise(state, Result(standing.status, refused.message), None)

    def _summarise(self, state: RolloutState, result: Result, reward: float | None) -> RolloutSummary:
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


async def _look(assignment: Assignment, workspace: Workspace) -> Look:
    folders = workspace.folder, workspace.home_folder
    return await asyncio.to_thread(look_at, *folders, assignment.evaluator.reward_files)


async def _close_when_prepared(preparing: asyncio.Future[Workspace]) -> None:
    with suppress(RolltapError):
        await (await preparing).close()


async def _tear_down(state: RolloutState) -> None:
    if state.clean is not None:
        if not state.clean.done():
            state.clean.cancel()
        with suppress(asyncio.CancelledError, RolltapError):
            await (await state.clean).close()
    if state.workspace is not None:
        await state.workspace.close()
