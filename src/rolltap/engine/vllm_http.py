"""vLLM's HTTP, as the embedded and the scripted engine write it: replies of the token API, errors, and the key.

An error is `{"error": {"message", "type", "param", "code"}}`. Who reaches a server's port can pause it and load
weights, so off loopback it needs a key.

Source: vLLM 0.32, `entrypoints/scale_out/token_in_token_out` and `entrypoints/openai/completion`.
"""

from __future__ import annotations

import base64
import hmac
import io
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
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


class ScoredToken(NamedTuple):
    """An id with its log-prob, and the likeliest candidates in its place as (id, log-prob); none if not asked for."""

    id: int
    logprob: float | None
    candidates: Sequence[tuple[int, float]] = ()


def generate_choice(
    index: int, ids: Sequence[int], scored: Sequence[ScoredToken] | None, finish: str | None, **more: Any
) -> dict[str, Any]:
    """A choice, or a streamed piece of one, of `/inference/v1/generate`. `scored`: None without log-probs."""
    logprobs = None
    if scored is not None:
        content = [
            {
                "token_id": token.id,
                "logprob": token.logprob,
                "rank": None,
                "top_logprobs": [{"token_id": id, "logprob": value} for id, value in token.candidates],
            }
            for token in scored
        ]
        logprobs = {"content": content}
    return {
        "index": index,
        "token_ids": ids,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": None,
        **more,
    }


def completion_choice(
    index: int, text: str, scored: Sequence[ScoredToken] | None, finish: str | None, **more: Any
) -> dict[str, Any]:
    """A choice, or a streamed piece of one, of `/v1/completions`. `scored`: None without log-probs."""
    logprobs = None
    if scored is not None:
        tops = [{f"token_id:{id}": value for id, value in token.candidates} for token in scored if token.candidates]
        logprobs = {
            "text_offset": [0] * len(scored),
            "tokens": [f"token_id:{token.id}" for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": tops or None,
        }
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": None,
        **more,
    }


def completion(id: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of `/v1/completions`, or an event of its stream."""
    return {"id": id, "object": "text_completion", "created": int(time.time()), "model": model, "choices": choices}


def prompt_logprobs(scored: Sequence[ScoredToken]) -> list[dict[str, dict[str, Any]] | None]:
    """For each id of the prompt its log-prob and its candidates', by id; none for the first one."""
    rows = [[*token.candidates, (token.id, token.logprob)] for token in scored]
    return [None, *({str(id): {"logprob": value, "rank": None} for id, value in row} for row in rows)]


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def npy(array: np.ndarray) -> str:
    """The array as a base64 `.npy` file."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()
