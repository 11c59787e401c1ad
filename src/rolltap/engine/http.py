"""What model servers' HTTP has in common: JSON responses, errors in vLLM's shape, and the key.

An error is `{"error": {"message", "type", "param", "code"}}`. Who reaches a server's port can pause it and load
weights, so off loopback it needs a key.
"""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from rolltap.errors import ConfigError, RolltapError
from rolltap.network import is_loopback

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


MIN_KEY = 16


def keyed(app: Any, host: str, key: str) -> Any:
    """`app` behind `key`, sent as a bearer key; `app` itself where there is none. `ConfigError` if one is needed."""
    if key and len(key) < MIN_KEY:
        raise ConfigError(f"the engine's key has {len(key)} characters; it needs {MIN_KEY} or more")
    if not key:
        if not is_loopback(host):
            raise ConfigError(
                f"listening on {host} needs a key: set ROLLTAP_ENGINE_KEY or --key, and api_key in the "
                "engine's section of the proxy's settings"
            )
        return app
    expected = f"Bearer {key}".encode()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(sent, expected):
                error = {"message": "send the engine's key as `Authorization: Bearer KEY`", "type": "Unauthorized"}
                await JSONResponse({"error": {**error, "code": 401}}, 401)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded
