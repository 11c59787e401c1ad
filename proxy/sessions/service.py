"""Opens and closes sessions for the API. Mints a session's key, which is shown once and stored only as a hash. Checks
where a session may be forked: after a completed call of a policy whose prompts rolltap makes of token ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from rolltap.calllog.facts import CallLog, CallRow
from rolltap.contract.keys import key_hash
from rolltap.contract.rules import NO_RULES, SessionRules
from rolltap.contract.tags import ReplayedSession, check_tags, roles_in
from rolltap.errors import InvalidRequest, NotFound, RecordCorrupt
from rolltap.ids import new_id
from rolltap.proxy.call.policies import Policies
from rolltap.settings import LimitSettings
from rolltap.tenants import tenant_tags
from rolltap.types import Origin, Outcome, RolloutParent, Session

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

        `origin`: where it is forked from another session; the caller has checked it (`check_origin`).
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


async def check_origin(log: CallLog, policies: Policies, session: Session, origin: Origin) -> None:
    """Raises for an origin in `session` that no session could continue on its very tokens.

    `NotFound` for a call that is not on record in `session`, else `InvalidRequest` with the reason.
    """
    owner = await log.session_of(origin.call_id)
    if owner is None or owner.id != session.id:
        of = f"; it is one of session {owner.id}" if owner is not None else ""
        raise NotFound(f"no call {origin.call_id!r} in session {session.id}{of}", param="call")
    try:
        chain = await log.chain(Origin(session.id, origin.call_id))
    except RecordCorrupt as error:
        raise NotFound(f"call {origin.call_id}: {error.message}", param="call") from error
    if reason := _refusal(chain, policies, session):
        raise InvalidRequest(f"call {origin.call_id} can't be forked: {reason}", param="call")
    done = chain[-1].completion
    size = len(done.output_ids) if done is not None else 0
    if origin.at is not None and not 0 <= origin.at < size:
        message = f"at: the reply has {size} tokens, so 0 to {size - 1} of them can be kept; without `at`, all"
        raise InvalidRequest(message, param="at")
    takes_grammars = getattr(policies[session.policy].source, "grammars", False)
    if origin.at is not None and chain[-1].intent.shape.constrained and not takes_grammars:
        raise InvalidRequest(
            "at: a reply that this engine's grammar limited can't be gone on with in its middle", param="at"
        )


async def origin_of(log: CallLog, policies: Policies, parent: RolloutParent, policy: str) -> Origin:
    """Where the session of a rollout of `policy` begins that was forked from `parent`. Raises as `check_origin`."""
    session = await log.session_of(parent.call_id)
    if session is None or session.rollout_id != parent.rollout_id:
        raise NotFound(f"no call {parent.call_id!r} in rollout {parent.rollout_id}", param="call")
    if session.policy != policy:
        message = f"rollout {parent.rollout_id} is of policy {session.policy!r}, and its fork would be of {policy!r}"
        raise InvalidRequest(message, param="policy")
    origin = Origin(session.id, parent.call_id, parent.at)
    await check_origin(log, policies, session, origin)
    return origin


def _refusal(chain: Sequence[CallRow], policies: Policies, session: Session) -> str:
    """Why the last call of `chain` can't be forked; "" if it can."""
    intent, done = chain[-1].intent, chain[-1].completion
    if done is None:
        return "it is under way"
    if done.outcome is not Outcome.COMPLETED:
        return f"it ended as {done.outcome}"
    if intent.policy != session.policy:
        return f"it is of policy {intent.policy!r}, and the session's is {session.policy!r}"
    if intent.policy not in policies:
        return f"policy {intent.policy!r} is not served"
    source = policies[intent.policy].source
    if not source.knows_prompt or source.tokenizer is None:
        return f"policy {intent.policy!r} has no engine with a token API"
    if not len(chain[-1].prompt_ids) or not len(done.output_ids):
        return "its tokens are not on record"
    if source.tokenizer.lacks([*chain[-1].prompt_ids.tolist(), *done.output_ids.tolist()]):
        return f"it has ids that the tokenizer of policy {intent.policy!r} does not have"
    return "" if intent.lineage else "its place in the conversation is not on record"
