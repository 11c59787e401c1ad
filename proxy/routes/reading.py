"""The record for those who look at it, on the admin plane: typed, paged, changing nothing but notes.

Bodies are `rolltap.reading.types` as JSON. They are encoded as they are, past FastAPI's own serializer: a call may have
100,000 tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Response

from rolltap import wire
from rolltap.calllog.notes import Note
from rolltap.contract.notes import NewNote
from rolltap.proxy.access import By
from rolltap.proxy.routes.services import Services
from rolltap.reading.types import (
    BreakView,
    CallDetail,
    CallTokens,
    CallTurn,
    GroupDetail,
    GroupLine,
    PolicyLine,
    RolloutDetail,
    RunLine,
    RunPoint,
    SessionDetail,
    SessionOrder,
    SessionPage,
    SessionQuery,
)

MAX_PAGE = 1000
MAX_TOKENS = 200_000
JSON = "application/json"

Page = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Position = Annotated[int, Query(ge=0, lt=2**31)]
Where = Annotated[list[str], Query(description="conditions as `rolltap export --where` has them: reward>=0.5")]
Search = Annotated[str, Query(max_length=1000, description="words that a call's new text holds; `word*` may go on")]


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/read", tags=["reading"])
    _sessions(routes, services)
    _calls(routes, services)
    _groups(routes, services)
    _notes(routes, services)
    return routes


def _sessions(routes: APIRouter, services: Services) -> None:
    @routes.get("/sessions", response_model=SessionPage)
    async def find_sessions(
        search: Search = "",
        where: Where = [],  # noqa: B006 - FastAPI reads it
        sort: SessionOrder = "created_at",
        descending: bool = True,
        limit: Page = 50,
        offset: Position = 0,
    ) -> Response:
        """A page of sessions. While `indexed` is under 1, the list is still being made of a large record: ask again."""
        return _json(
            await services.reader.sessions(SessionQuery(search, tuple(where), sort, descending, limit, offset))
        )

    @routes.get("/sessions/{session_id}", response_model=SessionDetail)
    async def show_session(session_id: str) -> Response:
        """The session with its calls as a forest (`parent_id`), its reconstruction's report and its notes."""
        return _json(await services.reader.session(session_id))

    @routes.get("/sessions/{session_id}/transcript", response_model=tuple[CallTurn, ...])
    async def show_transcript(session_id: str) -> Response:
        """The session's text once: what each call added to its parent's conversation, and its reply."""
        return _json(await services.reader.transcript(session_id))

    @routes.get(
        "/sessions/{session_id}/trajectory",
        response_class=Response,
        responses={200: {"content": {wire.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def show_trajectory(session_id: str) -> Response:
        """The session's trajectory with all its arrays: a `rolltap.types.Trajectory` as `rolltap.wire` packs it."""
        trajectory = await services.reader.trajectory(session_id)
        return Response(await asyncio.to_thread(wire.pack, trajectory), media_type=wire.CONTENT_TYPE)


def _calls(routes: APIRouter, services: Services) -> None:
    @routes.get("/calls/{call_id}", response_model=CallDetail)
    async def show_call(call_id: str) -> Response:
        """The call with its whole conversation, tools and sampling settings."""
        return _json(await services.reader.call(call_id))

    @routes.get("/calls/{call_id}/tokens", response_model=CallTokens)
    async def show_tokens(call_id: str, start: Position = 0, end: Position | None = None) -> Response:
        """Tokens `[start, end)` of the call's prompt and output, 200,000 at most at once."""
        last = min(start + MAX_TOKENS, end if end is not None else start + MAX_TOKENS)
        return _json(await services.reader.tokens(call_id, start, last))

    @routes.get("/calls/{call_id}/break", response_model=BreakView | None)
    async def show_break(call_id: str, around: Page = 60) -> Response:
        """Where the call leaves its parent, with the tokens of both sides; null where it extends it."""
        return _json(await services.reader.break_of(call_id, around))


def _groups(routes: APIRouter, services: Services) -> None:
    @routes.get("/groups", response_model=tuple[GroupLine, ...])
    async def list_groups(policy: str | None = None, limit: Page = 50, before: str | None = None) -> Response:
        """The newest groups first; `before` is the last id of the former page."""
        return _json(await services.reader.groups(policy, limit, before))

    @routes.get("/groups/{group_id}", response_model=GroupDetail)
    async def show_group(group_id: str) -> Response:
        """The group's rollouts side by side, the best reward first."""
        return _json(await services.reader.group(group_id))

    @routes.get("/rollouts/{rollout_id}", response_model=RolloutDetail)
    async def show_rollout(rollout_id: str) -> Response:
        """The rollout with its rewards, its session and what its evaluator saw."""
        return _json(await services.reader.rollout(rollout_id))

    @routes.get("/policies", response_model=tuple[PolicyLine, ...])
    async def list_policies() -> Response:
        """Every policy of the ledger with its version, and its groups and rollouts by status."""
        return _json(await services.reader.policies())

    @routes.get("/runs", response_model=tuple[RunLine, ...])
    async def list_runs() -> Response:
        """One for each policy that groups were opened for."""
        return _json(await services.reader.runs())

    @routes.get("/runs/{policy}", response_model=tuple[RunPoint, ...])
    async def show_run(policy: str, limit: Annotated[int, Query(ge=1, le=100_000)] = 2000) -> Response:
        """The policy's last completed groups, in the order in which they completed: points of its curves."""
        return _json(await services.reader.run(policy, limit))


def _notes(routes: APIRouter, services: Services) -> None:
    @routes.post("/notes", response_model=Note)
    async def add_note(body: NewNote, by: By) -> Response:
        """Appends a score, label, comment or changed tag to a session or call. Nothing of what is trained changes.

        Its author is the key's id, unless the body names one.
        """
        return _json(await services.reader.note(replace(body, author=body.author or by.id)))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
