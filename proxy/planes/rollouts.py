"""Rollouts on the admin plane: submitted tasks, groups, attempts, rewards, the nodes that claim them, and what happens
to them as server-sent events.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from rolltap.contract import admin
from rolltap.contract.control import MOST_TURNS
from rolltap.contract.keys import Caller
from rolltap.contract.planes import EventPlane, NodePlane, RolloutPlane, TaskPlane
from rolltap.contract.tags import TURNS, main_role, role_tags, temperature_tag
from rolltap.errors import EngineUnavailable, Forbidden, InvalidRequest, LedgerError
from rolltap.ledger.groups import GroupSpec, parent_of
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.proxy.planes.bodies import paused
from rolltap.proxy.planes.policies import check_temperature, policy_of
from rolltap.proxy.planes.services import Routes, Services
from rolltap.proxy.sessions.service import origin_of
from rolltap.types import EVALUATION, PURPOSE_TAG, Group, Reward, Rollout, RolloutParent, Task

log = logging.getLogger(__name__)


class RolloutRoutes(Routes, RolloutPlane):
    async def open_group(self, body: admin.OpenGroup) -> Group:
        cast, task = self.services.resolve_roles(body.policy), admin.task_of(body.task)
        spec = GroupSpec(cast.policy, body.n, task, tuple(body.tags), body.rule, body.priority, cast.roles, cast.also)
        await _check_fork(self.services, task, cast.policy)
        return await self.services.ledger.groups.open(spec, group_id=body.id)

    async def cancel_group(self, group_id: str) -> Group:
        return await self.services.ledger.groups.cancel(group_id)

    async def start_rollout(self, rollout_id: str, body: admin.StartRollout) -> admin.AttemptKey:
        return await _start(self.services, rollout_id, body, self.by)

    async def fork_rollout(self, rollout_id: str, body: admin.ForkRollout) -> Group:
        ledger = self.services.ledger
        await ledger.rollouts.check_own(rollout_id, self.by)
        parent = RolloutParent(rollout_id, body.call, body.at, body.id or "")
        policy = (await ledger.rollouts.group_of(rollout_id)).policy
        await origin_of(self.services.call_log, self.services.policies, parent, policy)
        return await ledger.groups.fork(parent, body.n)

    async def finish_rollout(self, rollout_id: str, body: admin.FinishRollout) -> Rollout:
        return await self.services.ledger.rollouts.finish(rollout_id, body, self.by)

    async def append_reward(self, body: admin.NewReward) -> Reward:
        return await self.services.ledger.rewards.append(body, self.by)


async def _check_fork(services: Services, task: Task, policy: str) -> None:
    if (parent := parent_of(task)) is not None:
        await origin_of(services.call_log, services.policies, parent, policy)


async def _start(services: Services, rollout_id: str, body: admin.StartRollout, by: Caller) -> admin.AttemptKey:
    ledger = services.ledger
    await ledger.rollouts.check_own(rollout_id, by, body.node_token)
    group = await ledger.rollouts.group_of(rollout_id)
    policy, roles, turns = group.policy, group.roles, body.turns
    tags, rules = role_tags(roles), body.rules
    if f"{PURPOSE_TAG}={EVALUATION}" in group.tags:
        tags[PURPOSE_TAG] = EVALUATION
    else:
        for name in group.trains or (policy,):
            control = await ledger.controls.of(name)
            turns = min(turns or MOST_TURNS, control.max_turns) if control.max_turns else turns
            if control.temperature is not None and _can_train_at(services, name, control.temperature):
                tags[temperature_tag(name, policy)] = str(control.temperature)
            rules += control.rules.of_roles(roles)
    if turns:
        tags[TURNS] = str(turns)
    parent = next(rollout for rollout in group.rollouts if rollout.id == rollout_id).parent
    origin = None if parent is None else await origin_of(services.call_log, services.policies, parent, policy)
    session, key = await services.sessions.open(
        policy, rollout_id=rollout_id, ttl=body.ttl, tags=tags, rules=rules, origin=origin
    )
    try:
        started = await ledger.rollouts.start(
            rollout_id, session.id, runner=body.runner, node_token=body.node_token, by=by
        )
    except (LedgerError, Forbidden):
        await services.sessions.close(session.id)
        raise
    return admin.AttemptKey(
        session_id=session.id,
        key=key,
        base_url=services.session_url(session.id),
        expires_at=session.expires_at,
        policy=policy,
        context=services.policies[policy].context,
        attempt=started.rollout.attempt,
        model=main_role(roles, policy) if roles else policy,
        roles=roles,
        contexts={role: services.policies[name].context for role, name in roles.items()},
        turns=turns,
        parent=parent,
        reward_scopes=started.reward_scopes,
    )


def _can_train_at(services: Services, policy: str, temperature: float) -> bool:
    """Whether attempts at a control's temperature could be trained; if not, they sample at the policy's own.

    The control was checked when it was set. But it outlives the server, whose engine or settings may be others by now.
    """
    try:
        check_temperature(policy_of(services, policy), temperature)
    except (InvalidRequest, EngineUnavailable) as error:
        log.warning("an attempt of policy %s begins without its control's temperature: %s", policy, error.message)
        return False
    return True


PAGE = 100


class TaskRoutes(Routes, TaskPlane):
    async def submit(self, body: admin.SubmitTasks) -> admin.Submission:
        cast = self.services.resolve_roles(body.policy)
        tasks: list[Task] = []
        async for task in paused(admin.task_of(submitted) for submitted in body.tasks):
            self.services.check_task(task, self.services.policies.names)
            await _check_fork(self.services, task, cast.policy)
            tasks.append(task)
        terms = (tuple(tasks), tuple(body.tags), body.rule, body.priority)
        spec = SubmissionSpec(cast.policy, body.n, *terms, cast.roles, cast.also, body.first, body.total)
        return await self.services.ledger.submissions.submit(spec, submission_id=body.id)

    async def list_submissions(self, limit: int = 50) -> admin.SubmissionList:
        return admin.SubmissionList(await self.services.ledger.submissions.list(limit=min(limit, 1000)))

    async def submission(self, id: str) -> admin.Submission:
        return await self.services.ledger.submissions.get(id)

    async def submission_groups(self, id: str, after: str = "") -> admin.GroupList:
        submissions = self.services.ledger.submissions
        await submissions.get(id)
        return admin.GroupList(await submissions.groups(id, after=after, limit=PAGE))

    async def cancel_submission(self, id: str) -> admin.Submission:
        return await self.services.ledger.submissions.cancel(id)

    async def submission_events(self, id: str) -> AsyncIterator[bytes]:
        start = await self.services.ledger.events.last()
        return _sse_events(self.services, await self.services.ledger.submissions.get(id), start)


async def _sse_events(services: Services, first: admin.Submission, start: int) -> AsyncIterator[bytes]:
    ledger = services.ledger
    yield sse_event("progress", asdict(first), start)
    if first.ended:
        yield sse_event("ended", asdict(first))
        return
    known: dict[str, bool] = {}
    async for event in ledger.events.follow(start):
        group_id = event.subject if event.kind.startswith("group_") else event.data.get("group_id")
        if event.subject != first.id:
            if group_id is None:
                continue
            if group_id not in known:
                known[group_id] = await ledger.submissions.of_group(group_id) == first.id
            if not known[group_id]:
                continue
        yield sse_event(event.kind, asdict(event), event.seq)
        if event.kind in ("group_complete", "group_dropped", "submission_cancelled"):
            now = await ledger.submissions.get(first.id)
            yield sse_event("progress", asdict(now), event.seq)
            if now.ended:
                yield sse_event("ended", asdict(now))
                return


def sse_event(kind: str, data: Any, id: int | None = None) -> bytes:
    """One event of a stream."""
    numbered = "" if id is None else f"id: {id}\n"
    return f"{numbered}event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


class EventRoutes(Routes, EventPlane):
    async def events(self, after: int | None = None) -> AsyncIterator[bytes]:
        events = self.services.ledger.events
        start = await events.last() if after is None else after
        return (sse_event(event.kind, asdict(event), event.seq) async for event in events.follow(start))


class NodeRoutes(Routes, NodePlane):
    async def work_waits(self, submission: str | None = None) -> admin.WorkWaits:
        return admin.WorkWaits(await self.services.ledger.nodes.has_work(submission))

    async def claim_rollouts(self, node: str, body: admin.ClaimRollouts) -> admin.AssignedRollouts:
        return admin.AssignedRollouts(await self.services.ledger.nodes.claim(node, body, self.by))

    async def heartbeat(self, node: str, body: admin.Heartbeat) -> admin.HeldRollouts:
        return admin.HeldRollouts(node, await self.services.ledger.nodes.heartbeat(body.tokens, body.ttl, self.by))

    async def release_rollouts(self, node: str) -> admin.ReleasedRollouts:
        return admin.ReleasedRollouts(node, await self.services.ledger.nodes.release(node, self.by))
