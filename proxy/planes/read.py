"""The record for those who look at it, on the admin plane: typed, paged, changing nothing but notes.

Bodies are `rolltap.reading.types` as JSON, made by the reading process and passed on as they come: a call may have
100,000 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response

from rolltap.calllog.notes import Note, append_note
from rolltap.contract.admin import NewNote
from rolltap.ledger.reading import GroupQuery
from rolltap.proxy.front.access import By
from rolltap.proxy.planes.answers import packed
from rolltap.proxy.planes.bodies import sliced
from rolltap.proxy.planes.services import Services
from rolltap.proxy.reading_process.questions import AskRecord
from rolltap.reading import RecordReader
from rolltap.reading.runs import VersionComparison, version_range
from rolltap.reading.types import (
    BreakView,
    CallDetail,
    CallTokens,
    CallTurn,
    GroupDetail,
    GroupLine,
    HarnessMismatch,
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

Page = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Position = Annotated[int, Query(ge=0, lt=2**31)]
Where = Annotated[list[str], Query(description="conditions as `rolltap export --where` has them: reward>=0.5")]
Search = Annotated[str, Query(max_length=1000, description="words in a call's new text; `word*` is a prefix")]


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/read", tags=["reading"], route_class=sliced({}))
    _sessions(routes, services)
    _calls(routes, services.ask)
    _groups(routes, services.ask)
    _mismatch(routes, services.ask)
    _comparison(routes, services.ask)
    _notes(routes, services)
    return routes


def _sessions(routes: APIRouter, services: Services) -> None:
    ask = services.ask

    @routes.get("/sessions", response_model=SessionPage)
    async def find_sessions(
        search: Search = "",
        where: Where = [],  # noqa: B006 - FastAPI reads it
        sort: SessionOrder = "created_at",
        descending: bool = True,
        limit: Page = 50,
        offset: Position = 0,
    ) -> Response:
        """A page of sessions. While `indexed` is below 1, the index of a large record is incomplete: ask again."""
        query = SessionQuery(search, tuple(where), sort, descending, limit, offset)
        return (await ask(RecordReader.sessions, query)).response()

    @routes.get("/sessions/{session_id}", response_model=SessionDetail)
    async def show_session(session_id: str) -> Response:
        """The session with its calls as a forest (`parent_id`), its reconstruction's report and its notes."""
        return (await ask(RecordReader.session, session_id)).response()

    @routes.get("/sessions/{session_id}/transcript", response_model=tuple[CallTurn, ...])
    async def show_transcript(session_id: str, by: By) -> Response:
        """The session's text without repetition: what each call added to its parent's conversation, and its reply.

        A runner may read the attempts that it started, because their evaluators score the model's text.
        """
        if by.only_own:
            session = await services.call_log.session(session_id)
            await services.ledger.rollouts.check_own_session(session_id, session and session.rollout_id, by)
        return (await ask(RecordReader.transcript, session_id)).response()

    @routes.get(
        "/sessions/{session_id}/trajectory",
        response_class=Response,
        responses=packed("a `Trajectory`"),
    )
    async def show_trajectory(session_id: str) -> Response:
        """The session's trajectory with all its arrays: a `rolltap.types.Trajectory` as `rolltap.wire` packs it."""
        return (await ask(RecordReader.trajectory, session_id)).response()


def _calls(routes: APIRouter, ask: AskRecord) -> None:
    @routes.get("/calls/{call_id}", response_model=CallDetail)
    async def show_call(call_id: str) -> Response:
        """The call with its whole conversation, tools and sampling settings."""
        return (await ask(RecordReader.call, call_id)).response()

    @routes.get("/calls/{call_id}/tokens", response_model=CallTokens)
    async def show_tokens(call_id: str, start: Position = 0, end: Position | None = None) -> Response:
        """Tokens `[start, end)` of the call's prompt and output, at most 200,000 per request."""
        last = min(start + MAX_TOKENS, end if end is not None else start + MAX_TOKENS)
        return (await ask(RecordReader.tokens, call_id, start, last)).response()

    @routes.get("/calls/{call_id}/break", response_model=BreakView | None)
    async def show_break(call_id: str, around: Page = 60) -> Response:
        """Where the call diverges from its parent, with the tokens of both sides. Null if it extends the parent."""
        return (await ask(RecordReader.break_of, call_id, around)).response()


def _groups(routes: APIRouter, ask: AskRecord) -> None:
    @routes.get("/groups", response_model=tuple[GroupLine, ...])
    async def list_groups(policy: str | None = None, limit: Page = 50, before: str | None = None) -> Response:
        """Lists groups, newest first. `before` is the last id of the previous page."""
        return (await ask(RecordReader.groups, GroupQuery(policy=policy or ""), limit, before)).response()

    @routes.get("/groups/{group_id}", response_model=GroupDetail)
    async def show_group(group_id: str) -> Response:
        """Compares the group's rollouts, best reward first."""
        return (await ask(RecordReader.group, group_id)).response()

    @routes.get("/rollouts/{rollout_id}", response_model=RolloutDetail)
    async def show_rollout(rollout_id: str) -> Response:
        """The rollout with its rewards, its session and what its evaluator saw."""
        return (await ask(RecordReader.rollout, rollout_id)).response()

    @routes.get("/policies", response_model=tuple[PolicyLine, ...])
    async def list_policies() -> Response:
        """Every policy of the ledger with its version, and its groups and rollouts by status."""
        return (await ask(RecordReader.policies)).response()

    @routes.get("/runs", response_model=tuple[RunLine, ...])
    async def list_runs() -> Response:
        """One for each policy that groups were opened for."""
        return (await ask(RecordReader.runs)).response()

    @routes.get("/runs/{policy}", response_model=tuple[RunPoint, ...])
    async def show_run(policy: str, limit: Annotated[int, Query(ge=1, le=100_000)] = 2000) -> Response:
        """The policy's last completed groups in order of completion, as points of its curves."""
        return (await ask(RecordReader.run, policy, limit)).response()


def _mismatch(routes: APIRouter, ask: AskRecord) -> None:
    @routes.get("/runs/{policy}/mismatch", response_model=tuple[HarnessMismatch, ...])
    async def show_mismatch(policy: str) -> Response:
        """How much the log-probs of trainer and engine differ, per harness, over the tokens that trainers annotated."""
        return (await ask(RecordReader.mismatch, policy)).response()


def _comparison(routes: APIRouter, ask: AskRecord) -> None:
    @routes.get("/runs/{policy}/compare", response_model=VersionComparison)
    async def compare_versions(policy: str, first: str, second: str) -> Response:
        """Compares two weight versions (`7`) or ranges (`0-9`) on their common tasks, largest gain first."""
        ranges = (version_range(first, "first"), version_range(second, "second"))
        return (await ask(RecordReader.compare, policy, *ranges)).response()


def _notes(routes: APIRouter, services: Services) -> None:
    @routes.post("/notes", response_model=Note)
    async def add_note(body: NewNote, by: By) -> Response:
        """Appends a score, label, comment or changed tag to a session or call. Training data does not change.

        The author is the key's id unless the body names one.
        """
        note = await append_note(services.call_log.database, replace(body, author=body.author or by.id))
        return Response(msgspec.json.encode(note), media_type="application/json")
