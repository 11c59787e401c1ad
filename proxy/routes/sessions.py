"""Sessions on the admin plane: opened, listed, shown with their forest of calls, closed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from rolltap.calllog.base import CallRow
from rolltap.contract.admin import OpenSession
from rolltap.errors import NotFound
from rolltap.proxy.access import By
from rolltap.proxy.call.turn_cap import REACHED, cap_of
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.values import Limit
from rolltap.reconstructor.report import report_of
from rolltap.types import Outcome, Session


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["sessions"])

    @routes.post("/sessions")
    async def open_session(body: OpenSession) -> dict[str, Any]:
        """Opens a session. Its key is in this answer and nowhere else."""
        session, key = await services.sessions.open(
            body.policy, rollout_id=body.rollout_id, ttl=body.ttl, tags=body.tags
        )
        return {
            "session_id": session.id,
            "key": key,
            "base_url": services.session_url(session.id),
            "expires_at": session.expires_at,
            "policy": session.policy,
        }

    @routes.get("/sessions")
    async def list_sessions(limit: Limit = 100, before: str | None = None) -> dict[str, Any]:
        """The newest sessions first; `before` is the last id of the former page."""
        page = await services.call_log.sessions(limit=min(limit, 1000), before=before)
        return {"sessions": [_session(session) for session in page]}

    @routes.get("/sessions/{session_id}")
    async def show_session(session_id: str) -> dict[str, Any]:
        """The session and its forest: each call's parent, break, tokens and outcome; and what is odd about it."""
        session = await _found(services, session_id)
        rows = await services.call_log.rows(session_id)
        found = await _findings(services, session_id)
        return {**_session(session), "findings": found, "calls": [_call(row) for row in rows]}

    @routes.get("/sessions/{session_id}/trajectory")
    async def show_trajectory(session_id: str) -> dict[str, Any]:
        """The reconstruction report, with the session's findings whole."""
        await _found(services, session_id)
        (trajectory,) = await services.trajectories([session_id])
        return {**report_of(trajectory).to_dict(), "findings": [asdict(found) for found in trajectory.findings]}

    @routes.post("/sessions/{session_id}/close")
    async def close_session(session_id: str, by: By) -> dict[str, Any]:
        """Later calls are refused. `capped` says whether some were before, for the session's cap of turns.

        `findings` are those of the session as it stands now.
        """
        session = await _found(services, session_id)
        await services.ledger.rollouts.check_own_session(session_id, session.rollout_id, by)
        await services.sessions.close(session_id)
        rows = await services.call_log.rows(session_id) if cap_of(session) else ()
        capped = any(REACHED in row.completion.error for row in rows if row.completion)
        return {"session_id": session_id, "capped": capped, "findings": await _findings(services, session_id)}

    return routes


async def _found(services: Services, session_id: str) -> Session:
    session = await services.call_log.session(session_id)
    if session is None:
        raise NotFound(f"no session {session_id!r}", param="session_id")
    return session


async def _findings(services: Services, session_id: str) -> list[dict[str, Any]]:
    """What is wrong or odd about a session, the worst first."""
    (trajectory,) = await services.trajectories([session_id])
    return [asdict(found) for found in trajectory.findings]


def _session(session: Session) -> dict[str, Any]:
    return {name: value for name, value in asdict(session).items() if name != "key_hash"}


def _call(row: CallRow) -> dict[str, Any]:
    intent, done = row.intent, row.completion
    return {
        "id": intent.id,
        "parent_id": intent.parent_id,
        "created_at": intent.created_at,
        "dialect": intent.dialect,
        "kind": intent.kind.value,
        "agent": intent.agent,
        "prompt_tokens": len(row.prompt_ids),
        "output_tokens": len(done.output_ids) if done else 0,
        "shared": intent.shared,
        "break": asdict(intent.break_) if intent.break_ else None,
        "outcome": done.outcome.value if done else Outcome.ABORTED.value if row.delivered is False else "open",
        "finish": done.finish.value if done else None,
        "flaw": done.flaw.value if done and done.flaw else None,
        "error": done.error if done else "",
        "versions": [asdict(span) for span in done.versions] if done else [],
        "delivered": row.delivered,
    }
