"""Reads and parses request bodies, and builds replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from tinker.types.shared.untyped_api_future import UntypedAPIFuture

from rolltap.errors import BodyTooLarge, InvalidRequest

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

PREFIX = "/api/v1"
MOST_BYTES = 64 << 20
"""The largest body that is accepted. The SDK sends up to 5 MB in one body."""


async def read(http: Request) -> bytes:
    """The whole body. Raises `InvalidRequest` if it is compressed, `BodyTooLarge` if it is over `MOST_BYTES`."""
    if http.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("compressed bodies are not taken")
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise BodyTooLarge(f"the body is over {MOST_BYTES >> 20} MB")
    return bytes(body)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Parses a JSON body. Raises `InvalidRequest` with the name of the first invalid field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequest(f"{where}: {first['msg']}", param=where) from error


def reply(value: BaseModel) -> Response:
    return Response(value.model_dump_json(), media_type="application/json")


def promise(id: str, model_id: str | None = None, sequence_ids: list[str] | None = None) -> Response:
    """The reply to a request whose result the client retrieves later by `id`."""
    return reply(UntypedAPIFuture(request_id=id, model_id=model_id, sample_sequence_ids=sequence_ids))
