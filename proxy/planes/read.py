"""The record for those who look at it, on the admin plane: typed, paged, changing nothing but notes.

The routes are made of `rolltap.reading.operations`. Bodies are `rolltap.reading.types` as JSON, made by the reading
process and passed on as they come: a call may have 100,000 tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import Parameter, Signature
from typing import Annotated, Any

import msgspec
from fastapi import Path, Query, Response

from rolltap.calllog.notes import append_note
from rolltap.contract.admin import NewNote
from rolltap.contract.keys import Caller
from rolltap.contract.operations import Operation, operations_of
from rolltap.proxy.front.access import By
from rolltap.proxy.planes.answers import packed
from rolltap.proxy.planes.router import PlaneRouter
from rolltap.proxy.planes.services import Services
from rolltap.reading.operations import ReadPlane
from rolltap.reading.reader import RecordReader
from rolltap.types import Trajectory


def router(services: Services) -> PlaneRouter:
    routes = PlaneRouter(tags=["reading"])
    for operation in operations_of(ReadPlane):
        add = _note(services) if operation.name == "note" else _question(services, operation)
        add.__name__, add.__doc__ = operation.title, operation.about
        reply = operation.types["return"]
        answer: dict[str, Any] = {"response_model": reply}
        if reply is Trajectory:
            answer = {"response_class": Response, "responses": packed("a `Trajectory`")}
        routes.add_api_route(operation.path, add, methods=[operation.method], **answer)
    return routes


def _question(services: Services, operation: Operation) -> Callable[..., Awaitable[Response]]:
    """Returns the endpoint that asks the reading process what the operation asks."""
    question = getattr(RecordReader, operation.name)

    async def endpoint(**values: Any) -> Response:
        if operation.own:
            await _check_own(services, operation.own, values)
        return (await services.ask(question, *operation.gathered(values))).response()

    ids = [(name, Annotated[str, Path()], Parameter.empty) for name in operation.ids]
    query = [(name, Annotated[kind, Query()], default) for name, kind, default in operation.query()]
    caller = [("by", By, Parameter.empty)] if operation.own else []
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in (*ids, *query, *caller)
    ]
    endpoint.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return endpoint


async def _check_own(services: Services, argument: str, values: dict[str, Any]) -> None:
    """Raises `Forbidden` for a runner's key that asks about what another one runs."""
    by: Caller = values.pop("by")
    if not by.only_own:
        return
    if argument == "rollout_id":
        await services.ledger.rollouts.check_own(values[argument], by)
    else:
        session = await services.call_log.session(values[argument])
        await services.ledger.rollouts.check_own_session(values[argument], session and session.rollout_id, by)


def _note(services: Services) -> Callable[..., Awaitable[Response]]:
    """Returns the endpoint that appends a note: this process writes the record."""

    async def endpoint(body: NewNote, by: By) -> Response:
        note = await append_note(services.call_log.database, msgspec.structs.replace(body, author=body.author or by.id))
        return Response(msgspec.json.encode(note), media_type="application/json")

    return endpoint
