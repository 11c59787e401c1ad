"""Who may call a route of the trainer and admin planes: the roles that its operation declares, else nobody.

`tests/unit/proxy/test_access.py` tries every route with every kind of key. The agent plane uses session keys and
project keys (`rolltap.proxy.call.admission`). `/health` and `/ready` need no key.

`TamperingCounter` counts requests that attack the proxy with a valid session key, on the session of the key. Requests
with an unknown key are not counted. Counting does not change the answer, even while the store is unavailable. A process
counts at most `MOST_COUNTED` requests of each kind per session, so that a flood stays cheap.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from cachetools import LRUCache
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.routing import compile_path

from rolltap.calllog.facts import CallLog
from rolltap.contract.base import MAX_BODY
from rolltap.contract.keys import MINTED, key_hash
from rolltap.contract.operations import TRY_HEADER, Operation, Plane, RequestTry, current_try, operations_of
from rolltap.contract.planes import AdminPlane, TrainerPlane
from rolltap.errors import Forbidden, StoreError, Unauthenticated
from rolltap.ledger.keys import Audit
from rolltap.proxy.front.connections import admit
from rolltap.proxy.sessions.keyring import Keyring
from rolltap.reading.plane import ReadPlane
from rolltap.tampering import TamperingAct, TamperingKind
from rolltap.tenants import act_for, acting_for, tenant_of
from rolltap.wording import Outage

Table = Mapping[str, Operation]
"""A plane's operations, by method and path."""


def table_of(*planes: type[Plane]) -> Table:
    return {operation.row: operation for plane in planes for operation in operations_of(plane)}


ADMIN_PLANE = table_of(AdminPlane, ReadPlane)
TRAINER_PLANE = table_of(TrainerPlane)
TABLES: Mapping[str, Table] = {"admin": ADMIN_PLANE, "trainer": TRAINER_PLANE}

_PATHS = {name: [compile_path(row.split()[1])[0] for row in table] for name, table in TABLES.items()}


def plane_of(path: str) -> str | None:
    """The plane that has a route with this path; None where it is neither the admin's nor the trainer's."""
    if path.startswith(("/v1/", "/s/")):
        return "agent"
    return next((name for name, patterns in _PATHS.items() if any(known.match(path) for known in patterns)), None)


def most_bytes_of(plane: str) -> Callable[[str], int]:
    """A function of a path of the plane: the limit of a body in bytes."""
    larger = [
        (compile_path(operation.path)[0], operation.most_bytes)
        for operation in TABLES[plane].values()
        if operation.most_bytes > MAX_BODY
    ]
    return lambda path: next((most for known, most in larger if known.match(path)), MAX_BODY)


AUDITED_BODY = 2048
"""The audit log has only the size and SHA-256 of a longer body."""

_bearer = HTTPBearer(auto_error=False, description="a key whose role may call the route")


def no_caller(key: str) -> Unauthenticated:
    """The refusal of a request whose `key` belongs to nobody; empty: it has none."""
    if not key:
        return Unauthenticated("send the plane's key as `Authorization: Bearer KEY`")
    if SESSION_KEY.fullmatch(key):
        return Unauthenticated("the key is not known here; a session's is for the agent plane, which has another port")
    return Unauthenticated("the key is not known, or it is over")


def guard(keyring: Keyring, audit: Audit, table: Table, note: CountTampering) -> Callable[..., Awaitable[None]]:
    """A FastAPI dependency that checks the caller's role by the route's row in `table` and stores the caller for the
    route. It writes audited operations and refusals to the audit log first. `note` counts calls with a session key."""

    plane = next((name for name, known in TABLES.items() if known is table), "")

    async def dependency(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> None:
        key = credentials.credentials.strip() if credentials is not None else ""
        caller = await keyring.caller(key) if key else None
        if caller is None:
            known = key or presented_key(request.scope["headers"])  # an agent's own dialect may use another header
            await note(known, TamperingKind.OTHER_PLANE, f"{request.method} {request.scope['path']}")
            raise no_caller(key)
        admit(request.scope)
        act_for(caller.tenant)
        row = f"{request.method} {request.scope['route'].path}"
        operation = table.get(row)
        roles = () if operation is None else operation.roles
        if caller.role not in roles:
            await audit.append(caller.id, caller.role, f"refused {row}", dict(request.path_params))
            needed = " or ".join(roles) or "none"
            raise Forbidden(f"{row} on the {plane} plane needs a key of role {needed}, not {caller.role}")
        assert operation is not None  # it has a role
        if operation.all_tenants and not caller.of_deployment:
            await audit.append(caller.id, caller.role, f"refused {row}", dict(request.path_params))
            raise Forbidden(f"this route shows all tenants; the key belongs to tenant {caller.tenant!r}")
        request.state.caller = caller
        if operation.audited:
            await audit.append(caller.id, caller.role, row, await _audit_details(request))
        current_try.set(RequestTry.read(request.headers.get(TRY_HEADER, "")))  # its entry is not yet its work

    return dependency


def plane_key_check(
    plane: str, keyring: Keyring, audit: Audit, note: CountTampering
) -> Callable[[str], Awaitable[None]]:
    """The gate's check of a key, before it reads a body. The key's role must be able to call a route of the plane."""
    plane_roles = {role for operation in TABLES[plane].values() for role in operation.roles}

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
        digest = await asyncio.to_thread(hashlib.sha256, body)
        return {**details, "bytes": len(body), "sha256": digest.hexdigest()}
    return {**details, "body": body.decode("utf-8", "replace").replace("\0", "")} if body else details


log = logging.getLogger("rolltap.tampering")

SESSIONS = 4096
"""Number of sessions with counts in memory. The least recently used are dropped and start again at 0."""
MOST_COUNTED = 100
AT_ONCE = 4
SESSION_KEY = re.compile(r"rt-[\w-]{43}")
ENCODED = re.compile(rb"%(25)?(2e|5c|23|3f|00)|/\.\.?(/|$)", re.IGNORECASE)
"""Dots, backslash, `#`, `?` and NUL, encoded once or twice; dot segments. An encoded slash is no attack: clients encode
the slash in a model's name."""
OTHER_PLANES = re.compile(
    r"/(leases|trainers|dead-letters|sessions|tasks|groups|rollouts|rewards|nodes|audit|keys|read)(/|$)"
)

CountTampering = Callable[[str, TamperingKind, str], Awaitable[None]]
"""Counts an act of tampering: session key, kind, detail."""


async def uncounted_acts(key: str, kind: TamperingKind, detail: str) -> None:
    """Counts nothing."""


class TamperingCounter:
    """Finds the session of a key and appends acts of tampering to it."""

    def __init__(self, call_log: CallLog, append: Callable[[str, TamperingAct], Awaitable[None]]) -> None:
        self._log = call_log
        self._append = append
        self._noted: LRUCache[str, Counter[TamperingKind]] = LRUCache(SESSIONS)
        self._under_way = 0
        self._outage = Outage(log)

    async def note(self, key: str, kind: TamperingKind, detail: str) -> None:
        if key.startswith(MINTED) or not SESSION_KEY.fullmatch(key) or self._under_way >= AT_ONCE:
            return
        hashed = key_hash(key)
        if self._noted.get(hashed, Counter())[kind] >= MOST_COUNTED:
            return
        self._under_way += 1
        try:
            session = await self._log.session_by_key(hashed)
            if session is None or session.closed_at is not None:
                return
            self._noted.setdefault(hashed, Counter())[kind] += 1
            with acting_for(tenant_of(session.tags)):
                await self._append(session.id, TamperingAct.at(kind, detail))
        except StoreError as error:
            self._outage.failed("an act of tampering (%s) could not be counted: %s", kind.value, error.message)
        finally:
            self._under_way -= 1


def presented_key(headers: Any) -> str:
    """The request's key in any header that a dialect uses; empty if it has none."""
    for name, value in headers:
        if name == b"authorization":
            return value.decode("latin-1").partition(" ")[2].strip()
        if name in (b"x-api-key", b"x-goog-api-key"):
            return value.decode("latin-1").strip()
    return ""


def suspicion(scope: Any) -> TamperingKind | None:
    """The kind of tampering that a request's path shows, if any."""
    if ENCODED.search(scope.get("raw_path") or b""):
        return TamperingKind.PATH
    path = re.sub(r"^/s/[^/]+", "", re.sub("//+", "/", scope["path"]))
    return TamperingKind.OTHER_PLANE if OTHER_PLANES.match(path) else None
