"""Routes of the trainer and admin planes, and their OpenAPI documents: bodies and replies are `rolltap.contract`'s and
the ledger's own types, which msgspec reads, writes and describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, get_type_hints

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.openapi.utils import get_openapi

from rolltap.contract.base import RequestBody
from rolltap.proxy.planes.bodies import body_of

REFERENCE = "#/components/schemas/{name}"


class PlaneRouter(APIRouter):
    """A router whose endpoints take a contract type as `body`, and return one, which is sent as JSON, or a `Response`.

    `kinds` are the types that the routes' descriptions name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kinds: list[Any] = []

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        hints = get_type_hints(endpoint, include_extras=True)
        reply = options.pop("response_model", None) or hints["return"]
        if not (isinstance(reply, type) and issubclass(reply, Response)):
            self.kinds.append(reply)
            options["responses"] = {200: answer("Successful Response", reply)} | (options.get("responses") or {})
        if (body := hints.get("body")) is not None:
            self.kinds.append(body)
            content = {"application/json": {"schema": schema_of(body)}}
            options["openapi_extra"] = {"requestBody": {"content": content, "required": True}}
        super().add_api_route(path, _adapted(endpoint, hints), response_model=None, **options)


def answer(meaning: str, kind: Any) -> dict[str, Any]:
    """The description of an answer with a `kind` as JSON."""
    return {"description": meaning, "content": {"application/json": {"schema": schema_of(kind)}}}


@cache
def schema_of(kind: Any) -> Mapping[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    return schema


def describe(app: FastAPI, kinds: Sequence[Any]) -> dict[str, Any]:
    """The application's OpenAPI document, with the schemas of `kinds` and of the types in them."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    document.setdefault("components", {})["schemas"] = schemas
    return document


def _adapted(endpoint: Callable[..., Any], hints: Mapping[str, Any]) -> Callable[..., Any]:
    """The endpoint as FastAPI calls it."""

    @wraps(endpoint)
    async def adapted(**values: Any) -> Response:
        reply = await endpoint(**values)
        if isinstance(reply, Response):
            return reply
        return Response(msgspec.json.encode(reply), media_type="application/json")

    parameters = [
        parameter.replace(annotation=Annotated[RequestBody, Depends(body_of(hints[name]))])
        if name == "body"
        else parameter.replace(annotation=hints.get(name, parameter.annotation))
        for name, parameter in signature(endpoint).parameters.items()
    ]
    adapted.__signature__ = signature(endpoint).replace(parameters=parameters, return_annotation=Response)  # type: ignore[attr-defined]
    return adapted
