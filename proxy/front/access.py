"""The roles that may call each route of the trainer and admin planes: one table, deny by default.

A route that is not in its plane's table refuses everybody. `tests/unit/proxy/test_access.py` tries every route with
every kind of key. The agent plane uses session keys and project keys (`rolltap.proxy.call.admission`). `/health` and
`/ready` need no key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.routing import compile_path

from rolltap.contract.keys import Caller, Role
from rolltap.contract.operations import operations_of
from rolltap.errors import Forbidden, Unauthenticated
from rolltap.ledger.keys import Audit
from rolltap.proxy.front.connections import admit
from rolltap.proxy.front.tampering import CountTampering
from rolltap.proxy.sessions.keys import Keyring
from rolltap.reading.operations import ReadPlane
from rolltap.tampering import TamperingKind
from rolltap.tenants import act_for, acting_for

Roles = tuple[Role, ...]
Table = Mapping[str, Roles]

ADMIN: Roles = ("admin",)
READ: Roles = ("admin", "viewer")
RUN: Roles = ("admin", "runner")
TRAIN: Roles = ("admin", "trainer")
LOOK_AT_TRAINING: Roles = ("admin", "trainer", "viewer")

ADMIN_PLANE: Table = {
    "POST /sessions": RUN,
    "POST /sessions/{session_id}/close": RUN,
    "POST /sessions/{session_id}/log": RUN,
    "POST /tasks": ADMIN,
    "GET /tasks": READ,
    "GET /tasks/{id}": READ,
    "GET /tasks/{id}/groups": READ,
    "GET /tasks/{id}/events": READ,
    "POST /tasks/{id}/cancel": ADMIN,
    "POST /groups": ADMIN,
    "POST /groups/{group_id}/cancel": ADMIN,
    "POST /rollouts/{rollout_id}/start": RUN,
    "POST /rollouts/{rollout_id}/finish": RUN,
    "POST /rewards": ("admin", "evaluator", "runner"),
    "GET /nodes/waiting": ("admin", "viewer", "runner"),
    "POST /nodes/{node}/claim": RUN,
    "POST /nodes/{node}/heartbeat": RUN,
    "POST /nodes/{node}/release": RUN,
    "GET /policies": READ,
    "GET /policies/{name}": READ,
    "POST /policies/{name}/control": ADMIN,
    "GET /events": READ,
    "GET /metrics": READ,
    "GET /diagnosis": READ,
    **{f"{each.method} {each.path}": each.roles for each in operations_of(ReadPlane)},
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
    "POST /policies/{name}/control": TRAIN,
    "POST /policies/{name}/score": TRAIN,
    "GET /policies/{name}/ranks": LOOK_AT_TRAINING,
    "POST /policies/{name}/receive": TRAIN,
}

TABLES: Mapping[str, Table] = {"admin": ADMIN_PLANE, "trainer": TRAINER_PLANE}

_PATHS = {name: [compile_path(row.split()[1])[0] for row in table] for name, table in TABLES.items()}


def plane_of(path: str) -> str | None:
    """The plane that has a route with this path; None where it is neither the admin's nor the trainer's."""
    if path.startswith(("/v1/", "/s/")):
        return "agent"
    return next((name for name, patterns in _PATHS.items() if any(known.match(path) for known in patterns)), None)


OF_DEPLOYMENT = frozenset({"GET /metrics", "GET /diagnosis"})
"""Routes that show all tenants. Only keys of the default tenant may use them."""

AUDITED = frozenset(
    {
        "POST /sessions",
        "POST /sessions/{session_id}/close",
        "POST /sessions/{session_id}/log",
        "POST /tasks",
        "POST /tasks/{id}/cancel",
        "POST /groups",
        "POST /groups/{group_id}/cancel",
        "POST /policies/{name}/control",
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
"""Routes in the audit log, in addition to refusals. Leases, claims, attempts and rewards have the key in their rows."""

AUDITED_BODY = 2048
"""The audit log has only the size and SHA-256 of a longer body."""

_bearer = HTTPBearer(auto_error=False, description="a key whose role may call the route")


def no_caller(key: str) -> Unauthenticated:
    """The refusal of a request whose `key` belongs to nobody; empty: it has none."""
    if not key:
        return Unauthenticated("send the plane's key as `Authorization: Bearer KEY`")
    return Unauthenticated("the key is not known, or it is over")


def guard(keyring: Keyring, audit: Audit, table: Table, note: CountTampering) -> Callable[..., Awaitable[None]]:
    """A FastAPI dependency that checks the caller's role by the route's row in `table` and stores the caller for the
    route. It writes `AUDITED` routes and refusals to the audit log first. `note` counts calls with a session key."""

    plane = next((name for name, known in TABLES.items() if known is table), "")

    async def dependency(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> None:
        key = credentials.credentials.strip() if credentials is not None else ""
        caller = await keyring.caller(key) if key else None
        if caller is None:
            await note(key, TamperingKind.OTHER_PLANE, f"{request.method} {request.scope['path']}")
            raise no_caller(key)
        admit(request.scope)
        act_for(caller.tenant)
        row = f"{request.method} {request.scope['route'].path}"
        roles = table.get(row, ())
        if caller.role not in roles:
            await audit.append(caller.id, caller.role, f"refused {row}", dict(request.path_params))
            needed = " or ".join(roles) or "none"
            raise Forbidden(f"{row} on the {plane} plane needs a key of role {needed}, not {caller.role}")
        if row in OF_DEPLOYMENT and not caller.of_deployment:
            await audit.append(caller.id, caller.role, f"refused {row}", dict(request.path_params))
            raise Forbidden(f"this route shows all tenants; the key belongs to tenant {caller.tenant!r}")
        request.state.caller = caller
        if row in AUDITED:
            await audit.append(caller.id, caller.role, row, await _audit_details(request))

    return dependency


def plane_key_check(
    plane: str, keyring: Keyring, audit: Audit, note: CountTampering
) -> Callable[[str], Awaitable[None]]:
    """The gate's check of a key, before it reads a body. The key's role must be able to call a route of the plane."""
    plane_roles = {role for row in TABLES[plane].values() for role in row}

    async def check_key(key: str) -> None:
        caller = await keyring.caller(key)
        if caller is None:
            await note(key, TamperingKind.OTHER_PLANE, f"a request to the {plane} plane")
            raise no_caller(key)
        if caller.role not in plane_roles:
            with acting_for(caller.tenant):
                await audit.append(caller.id, caller.role, f"refused a body on the {plane} plane", {})
            raise Forbidden(
                f"the {plane} plane needs a key of role {' or '.join(sorted(plane_roles))}, not {caller.role}"
            )

    return check_key


async def _audit_details(request: Request) -> dict[str, Any]:
    """The part of a request for an audit entry: path parameters and body. Neither contains a key."""
    body = await request.body()
    details: dict[str, Any] = dict(request.path_params)
    if len(body) > AUDITED_BODY:
        return {**details, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return {**details, "body": body.decode("utf-8", "replace").replace("\0", "")} if body else details


async def _caller(request: Request) -> Caller:
    return request.state.caller


By = Annotated[Caller, Depends(_caller)]
"""A route's parameter: the caller."""
