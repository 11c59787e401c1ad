"""Keys of the trainer and admin planes. (The agent plane's keys are sessions: `rolltap.proxy.sessions.session_cache`.)

Deny by default: a plane's application takes a dependency that names the roles it serves, and a request whose bearer
key is of none of them gets 401. Keys are compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import Request

from rolltap.errors import Forbidden, Unauthenticated
from rolltap.settings import KeySettings

Role = Literal["admin", "trainer", "evaluator"]


class Keyring:
    """Which role a key has."""

    def __init__(self, keys: KeySettings) -> None:
        self._roles: list[tuple[Role, bytes]] = [
            ("admin", keys.admin.encode()),
            ("trainer", keys.trainer.encode()),
            ("evaluator", keys.evaluator.encode()),
        ]

    def role(self, key: str) -> Role | None:
        """The role of `key`; every known key is compared, so the time taken tells nothing."""
        found: Role | None = None
        for role, known in self._roles:
            if known and hmac.compare_digest(known, key.encode()):
                found = role
        return found

    def require(self, *roles: Role) -> Callable[[Request], Awaitable[Role]]:
        """A FastAPI dependency that lets only `roles` pass."""

        async def dependency(request: Request) -> Role:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not key:
                raise Unauthenticated("send the plane's key as `Authorization: Bearer KEY`")
            role = self.role(key.strip())
            if role is None:
                raise Unauthenticated("the key is not known")
            if role not in roles:
                raise Forbidden(f"this needs a key of role {' or '.join(roles)}, not {role}")
            return role

        return dependency
