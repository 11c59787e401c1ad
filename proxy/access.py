"""Who may call which route of the trainer and admin planes: one table, deny by default.

A route that is not in its plane's table answers nobody, and a test fails (`tests/unit/proxy/test_access.py`, which
tries every route with every kind of key). The agent plane's keys are the sessions' and the projects'
(`rolltap.proxy.call.admission`); `/health` and `/ready` take no key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from rolltap.contract.keys import Caller, Role
from rolltap.errors import Forbidden, Unauthenticated
from rolltap.ledger.audit import Audit
from rolltap.proxy.front.connections import admit
from rolltap.proxy.front.tampering import CountTampering
from rolltap.proxy.sessions.keys import Keyring
from rolltap.tampering import TamperingKind
from rolltap.tenants import act_for

Roles = tuple[Role, ...]
Table = Mapping[str, Roles]

ADMIN: Roles = ("admin",)
READ: Roles = ("admin", "viewer")
RUN: Roles = ("admin", "runner")
TRAIN: Roles = ("admin", "trainer")
LOOK_AT_TRAINING: Roles = ("admin", "trainer", "viewer")

ADMIN_PLANE: Table = {
    "POST /sessions": ADMIN,
    "GET /sessions": READ,
    "GET /sessions/{session_id}": READ,
    "GET /sessions/{session_id}/trajectory": READ,
    "POST /sessions/{session_id}/close": RUN,
    "POST /sessions/{session_id}/log": RUN,
    "POST /tasks": ADMIN,
    "GET /tasks": READ,
    "GET /tasks/{id}": READ,
    "GET /tasks/{id}/groups": READ,
    "GET /tasks/{id}/events": READ,
    "POST /tasks/{id}/cancel": ADMIN,
    "POST /groups": ADMIN,
    "GET /groups": READ,
    "GET /groups/{group_id}": READ,
    "POST /groups/{group_id}/cancel": ADMIN,
    "GET /rollouts/{rollout_id}": ("admin", "viewer", "runner"),
    "POST /rollouts/{rollout_id}/start": RUN,
    "POST /rollouts/{rollout_id}/finish": RUN,
    "POST /rewards": ("admin", "evaluator", "runner"),
    "GET /nodes/waiting": ("admin", "viewer", "runner"),
    "POST /nodes/{node}/lease": RUN,
    "POST /nodes/{node}/heartbeat": RUN,
    "POST /nodes/{node}/release": RUN,
    "GET /policies": READ,
    "GET /policies/{name}": READ,
    "POST /policies/{name}/turns": ADMIN,
    "GET /events": READ,
    "GET /metrics": READ,
    "GET /read/sessions": READ,
    "GET /read/sessions/{session_id}": READ,
    "GET /read/sessions/{session_id}/transcript": READ,
    "GET /read/sessions/{session_id}/trajectory": READ,
    "GET /read/calls/{call_id}": READ,
    "GET /read/calls/{call_id}/tokens": READ,
    "GET /read/calls/{call_id}/break": READ,
    "GET /read/groups": READ,
    "GET /read/groups/{group_id}": READ,
    "GET /read/rollouts/{rollout_id}": READ,
    "GET /read/policies": READ,
    "GET /read/runs": READ,
    "GET /read/runs/{policy}": READ,
    "GET /read/runs/{policy}/mismatch": READ,
    "GET /read/runs/{policy}/compare": READ,
    "POST /read/notes": ADMIN,
    "GET /audit": ADMIN,
    "GET /keys": ADMIN,
    "POST /keys": ADMIN,
    "POST /keys/{key_id}/rotate": ADMIN,
    "POST /keys/{key_id}/revoke": ADMIN,
}

TRAINER_PLANE: Table = {
    "POST /leases": TRAIN,
    "POST /leases/{lease_id}/extend": TRAIN,
    "POST /leases/{lease_id}/ack": TRAIN,
    "POST /leases/{lease_id}/nack": TRAIN,
    "POST /leases/{lease_id}/release": TRAIN,
    "POST /leases/{lease_id}/annotations": TRAIN,
    "POST /trainers/{name}/rewind": TRAIN,
    "GET /dead-letters": LOOK_AT_TRAINING,
    "POST /dead-letters/{group_id}/revive": TRAIN,
    "GET /policies/{name}": LOOK_AT_TRAINING,
    "POST /policies/{name}/begin_update": TRAIN,
    "POST /policies/{name}/push": TRAIN,
    "POST /policies/{name}/finish_update": TRAIN,
    "POST /policies/{name}/turns": TRAIN,
    "POST /policies/{name}/score": TRAIN,
    "GET /policies/{name}/ranks": LOOK_AT_TRAINING,
    "POST /policies/{name}/receive": TRAIN,
}

OF_DEPLOYMENT = frozenset({"GET /metrics"})
"""Routes that show all tenants: for keys of the default one only."""

AUDITED = frozenset(
    {
        "POST /sessions",
        "POST /sessions/{session_id}/close",
        "POST /sessions/{session_id}/log",
        "POST /tasks",
        "POST /tasks/{id}/cancel",
        "POST /groups",
        "POST /groups/{group_id}/cancel",
        "POST /policies/{name}/turns",
        "POST /keys",
        "POST /keys/{key_id}/rotate",
        "POST /keys/{key_id}/revoke",
        "POST /trainers/{name}/rewind",
        "POST /dead-letters/{group_id}/revive",
        "POST /policies/{name}/begin_update",
        "POST /policies/{name}/push",
        "POST /policies/{name}/finish_update",
        "POST /policies/{name}/receive",
    }
)
"""What the audit log has, beside refusals. Leases, claims, attempts and rewards name their key in their own rows."""

AUDITED_BODY = 2048
"""A longer body stands in the audit log as its size and SHA-256."""

_bearer = HTTPBearer(auto_error=False, description="a key whose role may call the route")


def guard(keyring: Keyring, audit: Audit, table: Table, note: CountTampering) -> Callable[..., Awaitable[None]]:
    """A FastAPI dependency: lets the roles of the route's row pass, keeps the caller for the route, and has `AUDITED`
    routes and refusals in the audit log before they are served. `note` counts an agent that comes with its key."""

    async def dependency(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> None:
        if credentials is None or not credentials.credentials:
            raise Unauthenticated("send the plane's key as `Authorization: Bearer KEY`")
        caller = await keyring.caller(credentials.credentials.strip())
        if caller is None:
            where = f"{request.method} {request.scope['path']}"
            await note(credentials.credentials.strip(), TamperingKind.OTHER_PLANE, where)
            raise Unauthenticated("the key is not known, or it is over")
        admit(request.scope)
        act_for(caller.tenant)
        row = f"{request.method} {request.scope['route'].path}"
        roles = table.get(row, ())
        if caller.role not in roles:
            await audit.append(caller.id, caller.role, f"refused {row}", dict(request.path_params))
            raise Forbidden(f"this needs a key of role {' or '.join(roles) or 'none'}, not {caller.role}")
        if row in OF_DEPLOYMENT and not caller.of_deployment:
            await audit.append(caller.id, caller.role, f"refused {row}", dict(request.path_params))
            raise Forbidden(f"this shows all tenants, and the key is of tenant {caller.tenant!r}")
        request.state.caller = caller
        if row in AUDITED:
            await audit.append(caller.id, caller.role, row, await _asked(request))

    return dependency


async def _asked(request: Request) -> dict[str, Any]:
    """What an entry has of the request: its path's parameters and its body. Keys are in neither."""
    body = await request.body()
    details: dict[str, Any] = dict(request.path_params)
    if len(body) > AUDITED_BODY:
        return {**details, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return {**details, "body": body.decode("utf-8", "replace").replace("\0", "")} if body else details


async def _caller(request: Request) -> Caller:
    return request.state.caller


By = Annotated[Caller, Depends(_caller)]
"""A route's parameter: who calls."""
