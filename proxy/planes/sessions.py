"""Sessions on the admin plane: opened, closed, compared with the logs of their harnesses."""

from __future__ import annotations

from collections.abc import Mapping

from rolltap.contract.admin import ClosedSession, ForkSession, HarnessLog, OpenSession, SessionKey
from rolltap.contract.planes import SessionPlane
from rolltap.contract.rules import rules_of
from rolltap.contract.tags import ROLES, TURNS, ReplayedSession, inherited_tags, is_temperature_tag, roles_of
from rolltap.decoding import from_json
from rolltap.errors import Forbidden, InvalidRequest, LedgerError
from rolltap.proxy.call.budget import cap_of
from rolltap.proxy.planes.services import Routes, Services
from rolltap.proxy.reading_process.questions import SessionEnds
from rolltap.proxy.sessions.service import check_origin
from rolltap.types import EVALUATION, PURPOSE_TAG, UNCHECKED, LogCheck, Origin, Session


def judged_rollout(tags: Mapping[str, str]) -> str:
    """The rollout that a session's calls judge; "" for another session."""
    return tags.get("rollout", "") if tags.get("kind") == "judge" else ""


class SessionRoutes(Routes, SessionPlane):
    async def open_session(self, body: OpenSession) -> SessionKey:
        services = self.services
        if self.by.only_own:
            judged = body.rollout_id is None and not body.replay and judged_rollout(body.tags)
            if not judged:
                raise Forbidden("a runner's key opens only sessions of a judge: tags kind=judge, rollout=ID")
            await services.ledger.rollouts.check_own(judged, self.by)
        if body.replay:
            session, key = await _open_replay(services, body)
        else:
            session, key = await services.sessions.open(
                body.policy, rollout_id=body.rollout_id, ttl=body.ttl, tags=body.tags, rules=body.rules
            )
        return _session_key(services, session, key)

    async def fork_session(self, session_id: str, body: ForkSession) -> SessionKey:
        services = self.services
        session = await services.sessions.get(session_id)
        origin = Origin(session.id, body.call, body.at)
        await check_origin(services.call_log, services.policies, session, origin)
        tags = inherited_tags(session) | body.tags
        fork, key = await services.sessions.open(
            session.policy, ttl=body.ttl, tags=tags, rules=rules_of(session), origin=origin
        )
        return _session_key(services, fork, key)

    async def close_session(self, session_id: str) -> ClosedSession:
        services = self.services
        session = await services.sessions.get(session_id)
        if self.by.only_own and (judged := judged_rollout(session.tags)):
            await services.ledger.rollouts.check_own(judged, self.by)
        else:
            await services.ledger.rollouts.check_own_session(session_id, session.rollout_id, self.by)
        await services.sessions.close(session_id)
        also = services.policies.trainable_in(roles_of(session).values())
        ended = await services.ask(SessionEnds.ended, session_id, cap_of(session) > 0, also)
        return from_json(await ended.read(), ClosedSession)

    async def check_log(self, session_id: str, body: HarnessLog) -> LogCheck:
        session = await self.services.sessions.get(session_id)
        await self.services.ledger.rollouts.check_own_session(session_id, session.rollout_id, self.by)
        return await _checked(self.services, session, body)


def _session_key(services: Services, session: Session, key: str) -> SessionKey:
    base_url = services.session_url(session.id)
    context = services.policies[session.policy].context
    return SessionKey(session.id, key, base_url, session.expires_at, session.policy, context=context)


async def _open_replay(services: Services, body: OpenSession) -> tuple[Session, str]:
    recorded = await services.sessions.get(body.replay)
    if body.rules or body.rollout_id or body.policy not in (None, recorded.policy):
        raise InvalidRequest("a replay has the policy and rules of its session, and no rollout", param="replay")
    if not services.policies[recorded.policy].source.replayable:
        message = f"policy {recorded.policy!r} passed the vendor's bytes through; they are not on record"
        raise InvalidRequest(message, param="replay")
    if not any(row.completion is not None for row in await services.call_log.rows(recorded.id)):
        raise InvalidRequest(f"session {recorded.id} has no calls on record", param="replay")
    kept = {
        name: text
        for name, text in recorded.tags.items()
        if name in (ROLES, TURNS, "harness", "kind") or is_temperature_tag(name)
    }
    return await services.sessions.open(
        recorded.policy,
        ttl=body.ttl,
        tags={**body.tags, **kept, PURPOSE_TAG: EVALUATION},
        rules=rules_of(recorded),
        replay=ReplayedSession(recorded.id, body.replay_calls),
        origin=recorded.origin,
    )


async def _checked(services: Services, session: Session, log: HarnessLog) -> LogCheck:
    if session.log_check != UNCHECKED:
        return session.log_check
    if session.closed_at is None:
        raise InvalidRequest(f"session {session.id} is open; close it, so that its calls are complete", param="log")
    if session.rollout_id is not None and (await services.ledger.rollouts.get(session.rollout_id)).status.terminal:
        # What is trained was settled when the rollout ended.
        raise LedgerError(f"rollout {session.rollout_id} has ended; its harness's log is compared before")
    check = await services.ask(SessionEnds.compared, session.id, log)
    return await services.call_log.set_log_check(session.id, from_json(await check.read(), LogCheck))
