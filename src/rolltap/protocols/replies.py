"""Replies that dialects share: JSON bodies, server-sent events, errors, and constant replies to probes.

`PROBES` are the requests that harnesses send before their first model call. None of them needs a key or touches a
session. They are served at the root and under a session's prefix.

* Claude Code: `HEAD /api/hello` and `HEAD /`.
* Codex, with its built-in provider: a WebSocket upgrade of `GET /v1/responses`. 426 makes it fall back to HTTP at once;
  404, 405 and 501 cost it seconds; 400 ends the run. The server must pass upgrades on as plain requests (uvicorn:
  `ws="none"`).
* OpenAI's SDK can delete and cancel a response and list its input. The record is append-only, so the reply is 405.
* Load balancers: `GET /health`, as on the other planes. `/ready` is on those only.
* Hermes: Ollama's `POST /api/show`, `GET /api/tags`, `GET /api/v1/models`. There is no Ollama here, so the reply is
  404.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rolltap.errors import (
    ContextOverflow,
    EngineUnavailable,
    Forbidden,
    NotFound,
    RateLimited,
    RolltapError,
    SessionClosed,
    StoreUnavailable,
    Unauthenticated,
)
from rolltap.protocols.base import ClientEnvironment, WireReply

JSON_TYPE = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
DEFAULT_RETRY_S = 1
FINAL = (Unauthenticated, Forbidden, NotFound, SessionClosed)
"""Errors that repeating the request can't change."""

encode = msgspec.json.Encoder().encode


SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""The characters that JSON allows in a string and that readers such as Python's `str.splitlines` split lines at, in
UTF-8 and as JSON escapes. JSON escapes the others (U+000B, U+000C, U+001C to U+001E) itself."""


def unnamed_event(payload: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + encode_line(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + encode_line(payload) + b"\n\n"


def encode_line(payload: Any) -> bytes:
    """JSON without any character that a reader could take as the end of the line."""
    data = encode(payload)
    if not data.isascii():
        for character, escape in SEPARATORS:
            data = data.replace(character, escape)
    return data


def error_reply(error: RolltapError, payload: Any, headers: Mapping[str, str] | None = None) -> WireReply:
    """Returns an error's complete reply. Temporary errors have `retry-after`: Codex gives up at a 429 without it.

    Final ones have `x-should-retry: false`, which the SDKs of OpenAI and Anthropic obey: without it Claude Code repeats
    401 and 409 for minutes.
    """
    out = {"content-type": JSON_TYPE, **(headers or {})}
    if isinstance(error, RateLimited | EngineUnavailable | StoreUnavailable) or error.retry_after is not None:
        out["retry-after"] = str(math.ceil(error.retry_after or DEFAULT_RETRY_S))
    elif isinstance(error, FINAL):
        out["x-should-retry"] = "false"
    return WireReply(error.status, encode(payload), out)


OPENAI_ENVIRONMENT = ClientEnvironment("OPENAI_BASE_URL", "/v1", "OPENAI_API_KEY")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def bearer(headers: Mapping[str, str]) -> str | None:
    """Returns the token of `Authorization: Bearer`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def openai_key(headers: Mapping[str, str]) -> str | None:
    """Returns the API key from any of the headers that clients of the shared model list use."""
    keys = (headers.get(name) for name in ("api-key", "x-api-key", "x-goog-api-key"))
    return bearer(headers) or next((key for key in keys if key), None)


def _overflow(error: ContextOverflow) -> str:
    """OpenAI's and vLLM's wording, which clients search for."""
    if error.tokens is None or error.limit is None:
        return f"This model's maximum context length is exceeded: {error.message}"
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
        f"{error.tokens} tokens. Please reduce the length of the messages."
    )


def openai_error(error: RolltapError) -> WireReply:
    """`{"error": {...}}`. For a prompt that is too long, the message has the wording that clients search for."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message, param, code = error.message, error.param, error.code
    if isinstance(error, ContextOverflow):
        message = _overflow(error)
        param = param or "messages"
    elif isinstance(error, NotFound) and param == "model":
        code = "model_not_found"
    return error_reply(error, {"error": {"message": message, "type": kind, "param": param, "code": code}})


@dataclass(frozen=True, slots=True)
class Probe:
    """A path and its constant reply."""

    methods: Sequence[str]
    path: str
    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)


def _error(message: str, code: str) -> bytes:
    return encode({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})


_NO_WEBSOCKET = _error("this server speaks HTTP; POST /v1/responses", "upgrade_required")
_APPEND_ONLY = _error("what is on record can only be read: GET /v1/responses/{id}", "not_supported")
_NO_OLLAMA = _error("this server has no Ollama API; use /v1", "not_found")

PROBES: tuple[Probe, ...] = (
    Probe(("GET", "HEAD"), "/", 200),
    Probe(("GET", "HEAD"), "/api/hello", 200),
    Probe(("GET", "HEAD"), "/health", 200, b'{"status":"ok"}'),
    Probe(("GET",), "/v1/responses", 426, _NO_WEBSOCKET, {"upgrade": "HTTP/1.1"}),
    Probe(("DELETE",), "/v1/responses/{reply}", 405, _APPEND_ONLY, {"allow": "GET"}),
    Probe(("POST",), "/v1/responses/{reply}/cancel", 405, _APPEND_ONLY, {"allow": ""}),
    Probe(("GET",), "/v1/responses/{reply}/input_items", 405, _APPEND_ONLY, {"allow": ""}),
    Probe(("POST",), "/api/show", 404, _NO_OLLAMA),
    Probe(("GET",), "/api/tags", 404, _NO_OLLAMA),
    Probe(("GET",), "/api/v1/models", 404, _NO_OLLAMA),
)
