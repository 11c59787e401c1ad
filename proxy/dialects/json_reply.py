"""Writes JSON bodies, server-sent events and the headers of errors, for all dialects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from rolltap.errors import EngineUnavailable, RateLimited, RolltapError, StoreUnavailable
from rolltap.proxy.dialects.base import WireReply

JSON_TYPE = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
DEFAULT_RETRY_S = 1

encode = msgspec.json.Encoder().encode


def data_frame(payload: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + encode(payload) + b"\n\n"


def event_frame(name: str, payload: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + encode(payload) + b"\n\n"


def error_reply(error: RolltapError, payload: Any, headers: Mapping[str, str] | None = None) -> WireReply:
    """Returns an error's complete reply. Temporary errors have `retry-after`: Codex gives up at a 429 without it."""
    out = {"content-type": JSON_TYPE, **(headers or {})}
    if isinstance(error, RateLimited | EngineUnavailable | StoreUnavailable) or error.retry_after is not None:
        out["retry-after"] = str(math.ceil(error.retry_after or DEFAULT_RETRY_S))
    return WireReply(error.status, encode(payload), out)
