"""Opens and closes sessions for the API. Mints a session's key, which is shown once and stored only as a hash."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from rolltap.calllog.facts import CallLog
from rolltap.contract.keys import key_hash
from rolltap.contract.rules import NO_RULES, SessionRules
from rolltap.contract.tags import ReplayedSession, check_tags, roles_in
from rolltap.errors import InvalidRequest, NotFound
from rolltap.ids import new_id
from rolltap.settings import LimitSettings
from rolltap.tenants import tenant_tags
from rolltap.types import Origin, Session

KEY_BYTES = 32


class SessionService:
    """Opens and closes sessions. `policies()` returns the names that the current tenant may use. `closed(session)` is
    called for every session closed here, so that this process refuses its key at once."""

    def __init__(
        self,
        call_log: CallLog,
        policies: Callable[[], Sequence[str]],
        limits: LimitSettings,
        closed: Callable[[Session], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._now = clock
        self._log = call_log
        self._policies = policies
        self._limits = limits
        self._closed = closed

    async def open(
        self,
        policy: str | None = None,
        *,
        rollout_id: str | None = None,
        ttl: float | None = None,
        tags: Mapping[str, str] | None = None,
        rules: SessionRules = NO_RULES,
        replay: ReplayedSession | None = None,
        origin: Origin | None = None,
    ) -> tuple[Session, str]:
        """A new session and its key (256 random bits). `policy` may be left out if there is only one.

        `origin`: where it is forked from another session; the caller has checked it (`forking.check_origin`).
        """
        name = self._policy(policy)
        if ttl is not None and not 0 < ttl <= self._limits.session_ttl_s:
            raise InvalidRequest(f"ttl is a number of seconds up to {self._limits.session_ttl_s:g}", param="ttl")
        check_tags(tags or {}, name, self._policies())
        rules.check(roles_in(tags or {}))
        key = f"rt-{secrets.token_urlsafe(KEY_BYTES)}"
        now = self._now()
        session = Session(
            id=new_id(),
            policy=name,
            key_hash=key_hash(key),
            created_at=now,
            expires_at=now + (ttl or self._limits.session_ttl_s),
            rollout_id=rollout_id,
            tags=dict(tags or {}) | rules.tags() | (replay.tags() if replay else {}) | tenant_tags(),
            origin=origin,
        )
        await self._log.open_session(session)
        return session, key

    async def get(self, session_id: str) -> Session:
        """The session with this id. Raises `NotFound`."""
        session = await self._log.session(session_id)
        if session is None:
            raise NotFound(f"no session {session_id!r}", param="session_id")
        return session

    async def close(self, session_id: str) -> None:
        """Closes a session: later calls with its key are refused. Closing it again has no effect."""
        session = await self.get(session_id)
        if session.closed_at is None:
            await self._log.close_session(session_id, self._now())
        self._closed(session)

    def _policy(self, policy: str | None) -> str:
        served = self._policies()
        known = ", ".join(served)
        if policy is None:
            if len(served) != 1:
                raise InvalidRequest(f"name a policy; served: {known}", param="policy")
            return served[0]
        if policy not in served:
            raise InvalidRequest(f"no policy {policy!r}; served: {known}", param="policy")
        return policy
