"""Submitted tasks on the admin plane: queued, followed, cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from rolltap.contract.admin import NewTask, SubmitTasks
from rolltap.ledger.base import Event
from rolltap.ledger.submissions import Submission, SubmissionSpec
from rolltap.proxy.routes import answers
from rolltap.proxy.routes.answers import GroupList, SubmissionList
from rolltap.proxy.routes.events import sse_event
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.slices import pausing, sliced
from rolltap.proxy.routes.values import Limit

PAGE = 100


def task_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["tasks"], route_class=sliced({"tasks": NewTask}))
    ledger = services.ledger

    @routes.post("/tasks")
    async def submit(body: SubmitTasks) -> Submission:
        """Queues `n` rollouts of each task. Idempotent by `id`. Refuses a task that no node could run."""
        policy, roles = services.resolve_roles(body.policy)
        await pausing(body.tasks, lambda task: services.check_task(task, services.policies.names))
        spec = SubmissionSpec(policy, body.n, tuple(body.tasks), tuple(body.tags), body.rule, body.priority, roles)
        return await ledger.submissions.submit(spec, submission_id=body.id)

    @routes.get("/tasks")
    async def list_submissions(limit: Limit = 50) -> SubmissionList:
        """Lists submissions, newest first."""
        return SubmissionList(await ledger.submissions.list(limit=min(limit, 1000)))

    @routes.get("/tasks/{id}")
    async def show(id: str) -> Submission:
        return await ledger.submissions.get(id)

    @routes.get("/tasks/{id}/groups")
    async def groups(id: str, after: str = "") -> GroupList:
        """A page of the submission's groups by id. `after` is the last id of the previous page."""
        await ledger.submissions.get(id)
        return GroupList(await ledger.submissions.groups(id, after=after, limit=PAGE))

    @routes.post("/tasks/{id}/cancel")
    async def cancel(id: str) -> Submission:
        """Cancels queued and running rollouts. Complete groups stay."""
        return await ledger.submissions.cancel(id)

    @routes.get(
        "/tasks/{id}/events",
        response_class=StreamingResponse,
        responses=answers.events("`progress`, what happens as `Event`, `ended`"),
    )
    async def events(id: str) -> StreamingResponse:
        """Server-sent events: first `progress`, then the events of its groups and rollouts, last `ended`."""
        start = await ledger.events.last()
        first = await ledger.submissions.get(id)
        return StreamingResponse(_sse_events(services, first, start), media_type="text/event-stream")

    return routes


async def _sse_events(services: Services, first: Submission, start: int) -> AsyncIterator[bytes]:
    ledger = services.ledger
    yield sse_event("progress", asdict(first), start)
    if first.ended:
        yield sse_event("ended", asdict(first))
        return
    known: dict[str, bool] = {}
    async for event in ledger.events.follow(start):
        group_id = _group_of(event)
        if event.subject != first.id:
            if group_id is None:
                continue
            if group_id not in known:
                known[group_id] = await ledger.submissions.of_group(group_id) == first.id
            if not known[group_id]:
                continue
        yield sse_event(event.kind, asdict(event), event.seq)
        if event.kind in ("group_complete", "group_dropped", "submission_cancelled"):
            now = await ledger.submissions.get(first.id)
            yield sse_event("progress", asdict(now), event.seq)
            if now.ended:
                yield sse_event("ended", asdict(now))
                return


def _group_of(event: Event) -> str | None:
    """The group that the event is about."""
    return event.subject if event.kind.startswith("group_") else event.data.get("group_id")
