"""Writes JSON bodies, server-sent events and the headers of errors, for all dialects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from rolltap.errors import (
    EngineUnavailable,
    Forbidden,
    NotFound,
    RateLimited,
    RolltapError,
    SessionClosed,
    StoreUnavailable,
    Unauthenticated,
)
from rolltap.proxy.dialects.base import WireReply

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
