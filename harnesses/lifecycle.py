"""Runs one attempt with our own harnesses: prepare, run, evaluate, tear down. Each stage has its own slots.

A slot of one stage never waits for another stage, so a slow test does not block an agent. Time limits count a stage's
own time, not the wait for a slot. Failures of the agent are results.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rolltap.errors import EvaluatorFailed, RolltapError, SetupTimedOut, Unreadable
from rolltap.harnesses.attempts import AttemptRunner, RolloutState, Stage
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
from rolltap.harnesses.client import OpenedSession
from rolltap.harnesses.logs.check import check_log
from rolltap.harnesses.result import CAUSES, STATUSES, Result, reason_of, unanswered
from rolltap.harnesses.tampering import WorkspaceSnapshot, acts_since, take_snapshot
from rolltap.harnesses.untrusted import read_untrusted
from rolltap.tampering import MOST_ACTS, TamperingAct, TamperingKind
from rolltap.types import RolloutStatus, Task

log = logging.getLogger("rolltap.runner")

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


@dataclass(slots=True)
class Workspaces:
    """The workspaces of one attempt: the agent's, and a clean one without access for the agent."""

    agent: Workspace | None = None
    clean: asyncio.Task[Workspace] | None = None


class RolloutRunner(AttemptRunner[Assignment]):
    """Runs rollouts with our own harnesses, runtimes and evaluators."""

    async def _attempt(self, state: RolloutState[Assignment]) -> Result:
        assignment, workspaces = state.assignment, Workspaces()
        try:
            async with self._stage(state, Stage.PREPARE):
                workspace = workspaces.agent = await self._prepare(assignment)
            async with self._stage(state, Stage.RUN):
                if assignment.evaluator.needs_clean_workspace:
                    workspaces.clean = asyncio.create_task(self._prepare_clean(assignment))
                before = await _scan(assignment, workspace)
                session = await self._open(state)
                exit_ = await self._run_agent(assignment, session, workspace)
                closed = await self.client.close_session(session.session_id)
                if STATUSES[exit_.ending] is RolloutStatus.SUCCEEDED and not closed.answered:
                    return unanswered(exit_)
                if closed.capped and exit_.ending is Ending.CRASHED:
                    exit_ = replace(exit_, ending=Ending.LIMIT)
                await check_log(self.client, session, assignment.harness, workspace, exit_)
            async with self._stage(state, Stage.EVALUATE):
                state.tampering = await _acts_since(before, assignment, workspace)
                if exit_.excess:
                    excess = TamperingAct.at(TamperingKind.LIMITS, exit_.excess)
                    state.tampering = [*state.tampering[: MOST_ACTS - 1], excess]
                try:
                    verdict = await self._evaluate(state, workspace, workspaces.clean, exit_)
                except EvaluatorFailed as failure:
                    return Result.by(failure)
                except Unreadable as error:  # what the agent left can't be judged: it is worth nothing
                    unreadable = TamperingAct.at(TamperingKind.UNREADABLE, error.message)
                    state.tampering = [*state.tampering[: MOST_ACTS - 1], unreadable]
                    verdict = Verdict((Score(0.0),), {"unreadable": error.message})
            return Result(STATUSES[exit_.ending], reason_of(exit_), verdict, CAUSES.get(exit_.ending))
        finally:
            await asyncio.shield(_tear_down(workspaces))

    async def _prepare_clean(self, assignment: Assignment) -> Workspace:
        async with self._slots[Stage.PREPARE]:
            return await self._prepare(assignment)

    async def _prepare(self, assignment: Assignment) -> Workspace:
        """Creates a workspace. Raises `SetupTimedOut` after the set-up time limit; a late workspace is removed."""
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

    async def _run_agent(self, assignment: Assignment, session: OpenedSession, workspace: Workspace) -> Exit:
        endpoint = workspace.endpoint(session.endpoint)
        limits = replace(assignment.limits, turns=session.turns)
        job = Job(endpoint, assignment.task.instruction, workspace.workdir, workspace.home, limits)
        launch = assignment.harness.launch(job)
        return await workspace.run(launch, limits, limits.agent_s, reach=session.endpoint.base_url)

    async def _evaluate(
        self,
        state: RolloutState[Assignment],
        workspace: Workspace,
        clean: asyncio.Task[Workspace] | None,
        exit_: Exit,
    ) -> Verdict:
        evaluator, limits = state.assignment.evaluator, state.assignment.limits

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


async def _scan(assignment: Assignment, workspace: Workspace) -> WorkspaceSnapshot | None:
    """The workspace before the agent runs; None if the task's own files can't be read within limits."""
    folders = workspace.folder, workspace.home_folder
    try:
        return await read_untrusted(take_snapshot, *folders, tuple(assignment.evaluator.reward_files))
    except Unreadable as error:
        log.warning("task %s: tampering is not detected: %s", assignment.task.id, error.message)
        return None


async def _acts_since(
    before: WorkspaceSnapshot | None, assignment: Assignment, workspace: Workspace
) -> list[TamperingAct]:
    if before is None:
        return []
    folders = workspace.folder, workspace.home_folder
    try:
        return await read_untrusted(acts_since, before, *folders, tuple(assignment.evaluator.reward_files))
    except Unreadable as error:
        return [TamperingAct.at(TamperingKind.UNREADABLE, f"the workspace: {error.message}")]


async def _close_when_prepared(preparing: asyncio.Future[Workspace]) -> None:
    with suppress(RolltapError):
        await (await preparing).close()


async def _tear_down(workspaces: Workspaces) -> None:
    if workspaces.clean is not None:
        if not workspaces.clean.done():
            workspaces.clean.cancel()
        with suppress(asyncio.CancelledError, RolltapError):
            await (await workspaces.clean).close()
    if workspaces.agent is not None:
        await workspaces.agent.close()
