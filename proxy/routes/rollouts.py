"""Groups, rollouts and rewards on the admin plane."""

from __future__ import annotations

import logging

from fastapi import APIRouter

from rolltap.contract.admin import AttemptKey, FinishRollout, NewReward, OpenGroup, StartRollout
from rolltap.contract.control import MOST_TURNS
from rolltap.contract.keys import Caller
from rolltap.contract.tags import TEMPERATURE, TURNS, main_role, role_tags
from rolltap.errors import EngineUnavailable, Forbidden, InvalidRequest, LedgerError
from rolltap.ledger.groups import GroupSpec
from rolltap.proxy.front.access import By
from rolltap.proxy.routes.answers import GroupList, RolloutWithEvidence, fields_of
from rolltap.proxy.routes.policies import check_temperature, policy_of
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.slices import sliced
from rolltap.proxy.routes.values import Limit
from rolltap.types import EVALUATION, PURPOSE_TAG, Group, GroupStatus, Reward, Rollout

log = logging.getLogger(__name__)


def router(services: Services) -> APIRouter:
    """Groups, rollouts and rewards."""
    routes = APIRouter(tags=["rollouts"], route_class=sliced({}))
    _serve_groups(routes, services)
    _serve_rollouts(routes, services)

    @routes.post("/rewards")
    async def append_reward(body: NewReward, by: By) -> Reward:
        """Appends a reward. Repeating the same `id` with the same content changes nothing."""
        return await services.ledger.rewards.append(body, by)

    return routes


def _serve_groups(routes: APIRouter, services: Services) -> None:
    groups = services.ledger.groups

    @routes.post("/groups")
    async def open_group(body: OpenGroup) -> Group:
        """Opens a group of `n` rollouts of a task. Idempotent by `id`. 429 while too many groups are outstanding."""
        policy, roles = services.resolve_roles(body.policy)
        spec = GroupSpec(policy, body.n, body.task, tuple(body.tags), body.rule, body.priority, roles)
        return await groups.open(spec, group_id=body.id)

    @routes.get("/groups")
    async def list_groups(
        policy: str | None = None,
        status: GroupStatus | None = None,
        limit: Limit = 100,
        before: str | None = None,
    ) -> GroupList:
        """Lists groups, newest first, at most 1,000. `before` is the last id of the previous page."""
        page = await groups.list(policy=policy, status=status, limit=min(limit, 1000), before=before)
        return GroupList(page)

    @routes.get("/groups/{group_id}")
    async def show_group(group_id: str) -> Group:
        return await groups.get(group_id)

    @routes.post("/groups/{group_id}/cancel")
    async def cancel_group(group_id: str) -> Group:
        return await groups.cancel(group_id)


def _serve_rollouts(routes: APIRouter, services: Services) -> None:
    rollouts = services.ledger.rollouts

    @routes.get("/rollouts/{rollout_id}")
    async def show_rollout(rollout_id: str, by: By) -> RolloutWithEvidence:
        """The rollout with its rewards, its evaluator's output, and its agent's attempts to tamper."""
        await rollouts.check_own(rollout_id, by)
        rollout = await rollouts.get(rollout_id)
        acts = await services.ledger.tampering.of(rollout.session_id or "")
        evaluation = await rollouts.evaluation(rollout_id)
        return RolloutWithEvidence(**fields_of(rollout), evaluation=evaluation, tampering_acts=acts)

    @routes.post("/rollouts/{rollout_id}/start")
    async def start_rollout(rollout_id: str, body: StartRollout, by: By) -> AttemptKey:
        """Starts an attempt with its own session and key. The previous attempt's key becomes invalid.

        `turns` is the task's cap (0: none). The answer's `turns` is the lower of the task's and the control's caps; the
        proxy enforces it. `model` is the name that the harness requests: the policy's, or that of its main role.
        """
        return await _start(services, rollout_id, body, by)

    @routes.post("/rollouts/{rollout_id}/finish")
    async def finish_rollout(rollout_id: str, body: FinishRollout, by: By) -> Rollout:
        """Sets the final status and closes the session. After an infrastructure failure the rollout may be retried."""
        return await rollouts.finish(rollout_id, body, by)


async def _start(services: Services, rollout_id: str, body: StartRollout, by: Caller) -> AttemptKey:
    ledger = services.ledger
    await ledger.rollouts.check_own(rollout_id, by, body.node_token)
    group = await ledger.rollouts.group_of(rollout_id)
    policy, roles, turns = group.policy, group.roles, body.turns
    tags = role_tags(roles)
    if f"{PURPOSE_TAG}={EVALUATION}" in group.tags:
        tags[PURPOSE_TAG] = EVALUATION
    else:
        control = await ledger.controls.of(policy)
        turns = min(turns or MOST_TURNS, control.max_turns) if control.max_turns else turns
        if control.temperature is not None and _can_train_at(services, policy, control.temperature):
            tags[TEMPERATURE] = str(control.temperature)
    if turns:
        tags[TURNS] = str(turns)
    session, key = await services.sessions.open(policy, rollout_id=rollout_id, ttl=body.ttl, tags=tags)
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
