"""What an engine refuses because of the client's own request: an error that names the field in its dialect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rolltap.errors import EngineRefused, ModelNotLoaded, SchemaRefused
from rolltap.protocols.conversation import ChatRequest
from rolltap.proxy.call.sources.base import refused
from rolltap.settings import PinSettings

WORDS: Mapping[str, str] = {
    "max_tokens": r"max_(?:completion_|output_|new_)?tokens",
    "stop": r"stop|stop_sequences",
    "reasoning_effort": r"reasoning_effort|reasoning|effort",
    "tools": r"tools?(?:\[\d+\])?|functions?",
}
"""How upstreams name a field in their errors, where that is not its own name alone."""

CHECKED = (400, 413, 422)


@contextmanager
def schema_faults(request: ChatRequest) -> Iterator[None]:
    """Names the request's schema where an engine does not take it."""
    try:
        yield
    except SchemaRefused as error:
        raise refused(request, "response_format", f"the engine does not take this schema: {error.message}") from error


@contextmanager
def upstream_faults(request: ChatRequest, pins: PinSettings) -> Iterator[None]:
    """Names the field that a chat upstream refuses, if the client sent it: the upstream checks what is sent on."""
    try:
        yield
    except ModelNotLoaded:
        raise
    except EngineRefused as error:
        field = _named_field(request, pins, error.message) if error.http_status in CHECKED else None
        if field is None and isinstance(error, SchemaRefused):
            field = "response_format"
        if field is None:
            raise
        raise refused(request, field, f"the upstream does not take this: {error.message}") from error


def _named_field(request: ChatRequest, pins: PinSettings, message: str) -> str | None:
    """The field of the client's (by its `openai_chat` name) that an error names; None if it names none."""
    sampling = request.sampling
    numbers = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    sent = {name: getattr(sampling, name) is not None for name in (*numbers, *penalties)}
    sent |= {
        "stop": bool(sampling.stop),
        "reasoning_effort": sampling.effort is not None,
        "tool_choice": request.tool_choice.mode not in ("auto", "none"),
        "tools": bool(request.tools),
    }
    pinned = {name for name, value in pins.model_dump().items() if value is not None}
    for name, is_sent in sent.items():
        if is_sent and name not in pinned and re.search(rf"\b(?:{WORDS.get(name, name)})\b", message, re.IGNORECASE):
            return name
    return None
