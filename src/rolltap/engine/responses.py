"""JSON responses, and errors in vLLM's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rolltap.errors import RolltapError

ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowed", 503: "ServiceUnavailableError"}


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def sse_event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_body(error: RolltapError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "InternalServerError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RolltapError)
    return json_response(error_body(error), error.status)


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = ERROR_TYPES.get(error.status_code, "BadRequestError")
    body = {"message": f"{http.method} {http.url.path}: {error.detail}", "type": kind, "param": None}
    return json_response({"error": {**body, "code": error.status_code}}, error.status_code)


EXCEPTION_HANDLERS: dict[Any, Any] = {RolltapError: _on_error, HTTPException: _on_http_error}
