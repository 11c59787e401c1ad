"""Groups, rollouts and rewards on the admin plane."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from rolltap.contract.admin import CapTurns, FinishRollout, NewReward, OpenGroup, StartRollout
from rolltap.contract.keys import Caller
from rolltap.errors import Forbidden, LedgerError
from rolltap.ledger.groups import GroupSpec
from rolltap.proxy.access import By
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.values import Limit
from rolltap.proxy.sessions.roles import main_role, role_tags
from rolltap.proxy.sessions.tags import TURNS
from rolltap.types import EVALUATION, PURPOSE_TAG, GroupStatus


def router(services: Services) -> APIRouter:
    """Groups, rollouts and rewards."""
    routes = APIRouter(tags=["rollouts"])
    _serve_groups(routes, services)
    _serve_rollouts(routes, services)

    @routes.post("/policies/{name}/turns")
    async def cap_turns(name: str, body: CapTurns) -> dict[str, Any]:
        """Attempts that begin from now on have at most `turns` turns; 0 lifts the cap."""
        await services.ledger.turn_caps.set(name, body.turns)
        return {"policy": name, "turns": body.turns}

    @routes.post("/rewards")
    async def append_reward(body: NewReward, by: By) -> dict[str, Any]:
        """Appends a reward; the same `id` with the same content again changes nothing."""
        return asdict(await services.ledger.rewards.append(body, by))

    return routes


def _serve_groups(routes: APIRouter, services: Services) -> None:
    groups = services.ledger.groups

    @routes.post("/groups")
    async def open_group(body: OpenGroup) -> dict[str, Any]:
        """Opens a group of `n` rollouts of a task; idempotent by `id`. 429 while too many groups are outstanding."""
        policy, roles = services.resolve_roles(body.policy)
        spec = GroupSpec(policy, body.n, body.task, tuple(body.tags), body.rule, body.priority, roles)
        return asdict(await groups.open(spec, group_id=body.id))

    @routes.get("/groups")
    async def list_groups(
        policy: str | None = None,
        status: GroupStatus | None = None,
        limit: Limit = 100,
        before: str | None = None,
    ) -> dict[str, Any]:
        """The newest groups first, at most 1,000; `before` is the last id of the former page."""
        page = await groups.list(policy=policy, status=status, limit=min(limit, 1000), before=before)
        return {"groups": [asdict(group) for group in page]}

    @routes.get("/groups/{group_id}")
    async def show_group(group_id: str) -> dict[str, Any]:
        return asdict(await groups.get(group_id))

    @routes.post("/groups/{group_id}/cancel")
    async def cancel_group(group_id: str) -> dict[str, Any]:
        return asdict(await groups.cancel(group_id))


def _serve_rollouts(routes: APIRouter, services: Services) -> None:
    rollouts = services.ledger.rollouts

    @routes.get("/rollouts/{rollout_id}")
    async def show_rollout(rollout_id: str, by: By) -> dict[str, Any]:
        """The rollout with its rewards, and what its evaluator saw."""
        await rollouts.check_own(rollout_id, by)
        rollout = asdict(await rollouts.get(rollout_id))
        return {**rollout, "evaluation": await rollouts.evaluation(rollout_id)}

    @routes.post("/rollouts/{rollout_id}/start")
    async def start_rollout(rollout_id: str, body: StartRollout, by: By) -> dict[str, Any]:
        """A new attempt with a session and a key of its own; the key of the attempt before it dies.

        `turns` is the task's cap (0: none); the answer's is the lower of that and the policy's, and the proxy holds
        the session to it. `model` is the name that the harness asks for: the policy's, or that of its main role.
        """
        return await _start(services, rollout_id, body, by)

    @routes.post("/rollouts/{rollout_id}/finish")
    async def finish_rollout(rollout_id: str, body: FinishRollout, by: By) -> dict[str, Any]:
        """The one terminal state; closes the session."""
        return asdict(await rollouts.finish(rollout_id, body, by))


async def _start(services: Services, rollout_id: str, body: StartRollout, by: Caller) -> dict[str, Any]:
    ledger = services.ledger
    await ledger.rollouts.check_own(rollout_id, by)
    group = await ledger.rollouts.group_of(rollout_id)
    policy, roles = group.policy, group.roles
    turns = await ledger.turn_caps.of(policy, body.turns)
    tags = ({TURNS: str(turns)} if turns else {}) | role_tags(roles)
    if f"{PURPOSE_TAG}={EVALUATION}" in group.tags:
        tags[PURPOSE_TAG] = EVALUATION
    session, key = await services.sessions.open(policy, rollout_id=rollout_id, ttl=body.ttl, tags=tags)
    try:
        started = await ledger.rollouts.start(
            rollout_id, session.id, runner=body.runner, node_token=body.node_token, by=by
        )
    except (LedgerError, Forbidden):
        await services.sessions.close(session.id)
        raise
    return {
        "session_id": session.id,
        "key": key,
        "base_url": services.session_url(session.id),
        "expires_at": session.expires_at,
        "attempt": started.rollout.attempt,
        "policy": policy,
        "model": main_role(roles, policy) if roles else policy,
        "roles": roles,
        "turns": turns,
    }
