"""Routes of the trainer and admin planes and their OpenAPI documents, made of the planes' operations
(`rolltap.contract.operations`). Bodies and replies are the contract's own types, which msgspec reads, writes and
describes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse

from rolltap.contract.operations import Operation, Plane, operations_of
from rolltap.proxy.planes.bodies import body_of

REFERENCE = "#/components/schemas/{name}"


def routes_of(section: type[Plane], *parts: Any) -> APIRouter:
    """Returns the routes of a section of a plane. An object of it is made for every request, of the caller and `parts`.

    A method may return a `Response` in the place of its reply.
    """
    routes = APIRouter(tags=[section.tag])
    for operation in operations_of(section):
        extra: dict[str, Any] = {}
        if name := operation.body:
            content = {"application/json": {"schema": schema_of(operation.types[name])}}
            extra = {"requestBody": {"content": content, "required": True}}
        routes.add_api_route(
            operation.path,
            _endpoint(section, parts, operation),
            methods=[operation.method],
            responses=_responses(operation),
            response_class=Response,
            openapi_extra=extra,
        )
    return routes


def _endpoint(
    make: Callable[..., Plane], parts: Sequence[Any], operation: Operation
) -> Callable[..., Awaitable[Response]]:
    form = operation.reply[1]

    async def endpoint(request: Request, **values: Any) -> Response:
        method = getattr(make(request.state.caller, *parts), operation.name)
        reply = await method(*operation.gathered(values))
        if isinstance(reply, Response):
            return reply
        if form is None:
            return Response(msgspec.json.encode(reply), media_type="application/json")
        return StreamingResponse(reply, media_type=form.media_type) if reply is not None else Response(status_code=204)

    request = Parameter("request", Parameter.KEYWORD_ONLY, annotation=Request)
    endpoint.__signature__ = Signature([request, *_parameters(operation)])  # type: ignore[attr-defined]
    endpoint.__name__, endpoint.__doc__ = operation.title, operation.about
    return endpoint


def _parameters(operation: Operation) -> Iterator[Parameter]:
    for name in operation.ids:
        yield Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[str, Path()])
    for name, kind, default in operation.query():
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, Query()])
    if name := operation.body:
        kind = operation.types[name]
        yield Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, Depends(body_of(kind))])


def _responses(operation: Operation) -> dict[int | str, dict[str, Any]]:
    kind, form = operation.reply
    if form is None:
        return {200: answer("Successful Response", kind)}
    schema = {"type": "string"} | ({"format": form.format} if form.format else {})
    whole: dict[str, Any] = {"description": form.about, "content": {form.media_type: {"schema": schema}}}
    return {200: whole, 204: {"description": form.empty}} if form.empty else {200: whole}


def answer(meaning: str, kind: Any) -> dict[str, Any]:
    """The description of an answer with a `kind` as JSON."""
    return {"description": meaning, "content": {"application/json": {"schema": schema_of(kind)}}}


@cache
def schema_of(kind: Any) -> Mapping[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    return schema


def describe(app: FastAPI, sections: Sequence[type[Plane]], kinds: Sequence[Any]) -> dict[str, Any]:
    """The application's OpenAPI document: the sections' operations, and the schemas of their types and of `kinds`."""
    described = list(kinds)
    for operation in (each for section in sections for each in operations_of(section)):
        kind, form = operation.reply
        described += [kind] if form is None else []
        described += [operation.types[operation.body]] if operation.body else []
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = msgspec.json.schema_components(described, ref_template=REFERENCE)
    document.setdefault("components", {})["schemas"] = schemas
    return document
