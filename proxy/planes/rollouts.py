"""Rollouts on the admin plane: submitted tasks, groups, attempts, rewards, the nodes that claim them, and what happens
to them as server-sent events.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import StreamingResponse

from rolltap.contract.admin import (
    AssignedRollouts,
    AttemptKey,
    ClaimRollouts,
    FinishRollout,
    ForkRollout,
    Heartbeat,
    HeldRollouts,
    NewReward,
    OpenGroup,
    ReleasedRollouts,
    StartRollout,
    SubmitTasks,
    WorkWaits,
    task_of,
)
from rolltap.contract.control import MOST_TURNS
from rolltap.contract.keys import Caller
from rolltap.contract.tags import TURNS, main_role, role_tags, temperature_tag
from rolltap.errors import EngineUnavailable, Forbidden, InvalidRequest, LedgerError
from rolltap.ledger.groups import GroupSpec, parent_of
from rolltap.ledger.submissions import Submission, SubmissionSpec
from rolltap.proxy.front.access import By
from rolltap.proxy.planes import answers
from rolltap.proxy.planes.answers import GroupList, SubmissionList
from rolltap.proxy.planes.bodies import Limit, paused
from rolltap.proxy.planes.policies import check_temperature, policy_of
from rolltap.proxy.planes.router import PlaneRouter
from rolltap.proxy.planes.services import Services
from rolltap.proxy.sessions.forking import origin_of
from rolltap.types import EVALUATION, PURPOSE_TAG, Group, Reward, Rollout, RolloutParent, Task

log = logging.getLogger(__name__)


def router(services: Services) -> PlaneRouter:
    """Groups, rollouts and rewards."""
    routes = PlaneRouter(tags=["rollouts"])
    _serve_groups(routes, services)
    _serve_rollouts(routes, services)

    @routes.post("/rewards")
    async def append_reward(body: NewReward, by: By) -> Reward:
        """Appends a reward. Repeating the same `id` with the same content changes nothing."""
        return await services.ledger.rewards.append(body, by)

    return routes


def _serve_groups(routes: PlaneRouter, services: Services) -> None:
    groups = services.ledger.groups

    @routes.post("/groups")
    async def open_group(body: OpenGroup) -> Group:
        """Opens a group of `n` rollouts of a task. Idempotent by `id`. 429 while too many groups are outstanding.

        Where several policies are trained, each has a group with these rollouts (`trains`). Returns the first one's.
        """
        cast, task = services.resolve_roles(body.policy), task_of(body.task)
        spec = GroupSpec(cast.policy, body.n, task, tuple(body.tags), body.rule, body.priority, cast.roles, cast.also)
        await _check_fork(services, task, cast.policy)
        return await groups.open(spec, group_id=body.id)

    @routes.post("/groups/{group_id}/cancel")
    async def cancel_group(group_id: str) -> Group:
        return await groups.cancel(group_id)


def _serve_rollouts(routes: PlaneRouter, services: Services) -> None:
    rollouts = services.ledger.rollouts

    @routes.post("/rollouts/{rollout_id}/start")
    async def start_rollout(rollout_id: str, body: StartRollout, by: By) -> AttemptKey:
        """Starts an attempt with its own session and key. The previous attempt's key becomes invalid.

        `turns` is the task's cap (0: none). The answer's `turns` is the lower of the task's and the control's caps; the
        proxy enforces it. `model` is the name that the harness requests: the policy's, or that of its main role.
        """
        return await _start(services, rollout_id, body, by)

    @routes.post("/rollouts/{rollout_id}/fork")
    async def fork_rollout(rollout_id: str, body: ForkRollout, by: By) -> Group:
        """Adds `n` rollouts to this one's group, which is open, that continue call `call` of this one.

        Idempotent by `id`.
        """
        await rollouts.check_own(rollout_id, by)
        parent = RolloutParent(rollout_id, body.call, body.at, body.id or "")
        policy = (await rollouts.group_of(rollout_id)).policy
        await origin_of(services.call_log, services.policies, parent, policy)
        return await services.ledger.groups.fork(parent, body.n)

    @routes.post("/rollouts/{rollout_id}/finish")
    async def finish_rollout(rollout_id: str, body: FinishRollout, by: By) -> Rollout:
        """Sets the final status and closes the session. After an infrastructure failure the rollout may be retried."""
        return await rollouts.finish(rollout_id, body, by)


async def _check_fork(services: Services, task: Task, policy: str) -> None:
    if (parent := parent_of(task)) is not None:
        await origin_of(services.call_log, services.policies, parent, policy)


async def _start(services: Services, rollout_id: str, body: StartRollout, by: Caller) -> AttemptKey:
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
    return AttemptKey(
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


def task_router(services: Services) -> PlaneRouter:
    routes = PlaneRouter(tags=["tasks"])
    ledger = services.ledger

    @routes.post("/tasks")
    async def submit(body: SubmitTasks) -> Submission:
        """Queues `n` rollouts of each task. Idempotent by `id`. Refuses a task that no node could run."""
        cast = services.resolve_roles(body.policy)
        tasks: list[Task] = []
        async for task in paused(task_of(submitted) for submitted in body.tasks):
            services.check_task(task, services.policies.names)
            await _check_fork(services, task, cast.policy)
            tasks.append(task)
        terms = (tuple(tasks), tuple(body.tags), body.rule, body.priority)
        spec = SubmissionSpec(cast.policy, body.n, *terms, cast.roles, cast.also)
        return await ledger.submissions.submit(spec, submission_id=body.id)

    @routes.get("/tasks")
    async def list_submissions(limit: Limit = 50) -> SubmissionList:
        """Lists submissions, newest first."""
        return SubmissionList(await ledger.submissions.list(limit=min(limit, 1000)))

    @routes.get("/tasks/{id}")
    async def show(id: str) -> Submission:
        return await ledger.submissions.get(id)

    @routes.get("/tasks/{id}/groups")
    async def groups(id: str, after: str = "") -> GroupList:
        """A page of the submission's groups by id. `after` is the last id of the previous page."""
        await ledger.submissions.get(id)
        return GroupList(await ledger.submissions.groups(id, after=after, limit=PAGE))

    @routes.post("/tasks/{id}/cancel")
    async def cancel(id: str) -> Submission:
        """Cancels queued and running rollouts. Complete groups stay."""
        return await ledger.submissions.cancel(id)

    @routes.get(
        "/tasks/{id}/events",
        response_class=StreamingResponse,
        responses=answers.events("`progress`, what happens as `Event`, `ended`"),
    )
    async def events(id: str) -> StreamingResponse:
        """Server-sent events: first `progress`, then the events of its groups and rollouts, last `ended`."""
        start = await ledger.events.last()
        first = await ledger.submissions.get(id)
        return StreamingResponse(_sse_events(services, first, start), media_type="text/event-stream")

    return routes


async def _sse_events(services: Services, first: Submission, start: int) -> AsyncIterator[bytes]:
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


def event_router(services: Services) -> PlaneRouter:
    routes = PlaneRouter(tags=["events"])
    ledger = services.ledger

    @routes.get("/events", response_class=StreamingResponse, responses=answers.events("what happens, as `Event`"))
    async def events(after: Annotated[int | None, Query(ge=0, lt=2**63)] = None) -> StreamingResponse:
        """Streams new events. With `after` (the number of the last event received), also those since then."""
        start = await ledger.events.last() if after is None else after

        async def sse_events() -> AsyncIterator[bytes]:
            async for event in ledger.events.follow(start):
                yield sse_event(event.kind, asdict(event), event.seq)

        return StreamingResponse(sse_events(), media_type="text/event-stream")

    return routes


def node_router(services: Services) -> PlaneRouter:
    routes = PlaneRouter(tags=["nodes"])
    nodes = services.ledger.nodes

    @routes.get("/nodes/waiting")
    async def waiting(submission: str | None = None) -> WorkWaits:
        """True while unclaimed work exists, including work blocked by backpressure."""
        return WorkWaits(await nodes.has_work(submission))

    @routes.post("/nodes/{node}/claim")
    async def claim(node: str, body: ClaimRollouts, by: By) -> AssignedRollouts:
        """Claims up to `capacity` rollouts for `ttl` seconds. Waits up to `wait` seconds for the first one."""
        return AssignedRollouts(await nodes.claim(node, body, by))

    @routes.post("/nodes/{node}/heartbeat")
    async def heartbeat(node: str, body: Heartbeat, by: By) -> HeldRollouts:
        """Extends the claims of `tokens` by `ttl` seconds. Returns the rollouts that are still claimed with them."""
        return HeldRollouts(node, await nodes.heartbeat(body.tokens, body.ttl, by))

    @routes.post("/nodes/{node}/release")
    async def release(node: str, by: By) -> ReleasedRollouts:
        """Releases all claims of the node, so that other nodes can run its rollouts at once."""
        return ReleasedRollouts(node, await nodes.release(node, by))

    return routes
