"""Requests to a dialect, written as Python values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rolltap.errors import InvalidRequest
from rolltap.protocols.base import WireRequest
from rolltap.protocols.conversation import ChatRequest
from tests.dialects import DIALECTS

from .sdk_server import anthropic_client, gemini_client, openai_client, server, switch, url  # noqa: F401 - fixtures

Parse = Callable[..., ChatRequest]
Refusal = Callable[..., str | None]


@pytest.fixture(scope="session")
def parse() -> Parse:
    """`parse("anthropic", max_tokens=9, ...)`: the dialect's smallest request with these fields, parsed."""
    minimal: dict[str, dict[str, Any]] = {
        "openai_chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        "openai_responses": {"model": "m", "input": "hi"},
        "anthropic": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
        "gemini": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
        "openai_completions": {"model": "m", "prompt": "hi"},
    }

    def parse(name: str, *, headers: dict[str, str] | None = None, path: str = "", **fields: Any) -> ChatRequest:
        body = {**minimal[name], **fields}
        path = path or "/v1beta/models/m:generateContent" if name == "gemini" else path
        params = {"model": "m"} if name == "gemini" else {}
        wire = WireRequest(path, params, {}, headers or {}, json.dumps(body).encode())
        return DIALECTS[name].parse(wire)

    return parse


@pytest.fixture(scope="session")
def refusal(parse: Parse) -> Refusal:
    """Like `parse`, for a request that is refused: the field that the refusal names."""

    def refusal(name: str, **fields: Any) -> str | None:
        with pytest.raises(InvalidRequest) as raised:
            parse(name, **fields)
        return raised.value.param

    return refusal
