"""What sources share: upstreams that render their own prompts, refusals that name a field, images from foreign hosts.

An engine may refuse a call because of the client's own request (`upstream_faults`): the error names the field in its
dialect. The model server fetches image URLs, so a URL can reach into its network: only allowed hosts pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from rolltap.errors import EngineProtocolError, EngineRefused, InvalidRequest, ModelNotLoaded, SchemaRefused
from rolltap.protocols.conversation import IMAGE_LINE, TOOL_MEDIA, ChatRequest, Image, Text, TokenLogprob
from rolltap.protocols.dialects import known_dialects
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.plan import ParentFinder, PromptPlan
from rolltap.proxy.engines.base import EngineFacts
from rolltap.proxy.engines.decode import IDS
from rolltap.settings import PinSettings


def check_ids(ids: Sequence[int]) -> None:
    """Raises `EngineProtocolError` for a number that cannot be a token id."""
    low, high = (ids[0], ids[0]) if len(ids) == 1 else (min(ids, default=0), max(ids, default=0))
    if not 0 <= low <= high < IDS:
        raise EngineProtocolError("the engine returned an invalid token id: negative, or 2^31 or more")


class UpstreamSource:
    """The common part of chat and passthrough: the upstream renders the prompt, and rolltap only finds the parent."""

    __slots__ = ()

    parents: ParentFinder

    def learn(self, facts: EngineFacts) -> None:
        """Stores nothing: no fact matters here."""

    def effort(self, request: ChatRequest) -> str:
        return ""

    async def plan(self, call_id: str, forest: Forest, request: ChatRequest) -> PromptPlan:
        return self.parents.observe(call_id, forest, request)

    def token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...] | None:
        return None


def marks_of(request: ChatRequest) -> set[str]:
    """The marks of the request's messages."""
    return {mark for message in request.messages if message.marks for mark in message.marks}


def refused(request: ChatRequest, field: str, why: str) -> InvalidRequest:
    """An error that names the field in the request's dialect. `field` is its `openai_chat` name.

    `wire["names"]`: names that depend on the request, where a dialect has several for one thing.
    """
    names = {**known_dialects()[request.dialect].field_names, **request.wire.get("names", {})}
    name = names.get(field, field)
    return InvalidRequest(f"{name}: {why}", param=name)


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
        field = "response_format" if request.sampling.json_schema is not None else "tools"
        raise refused(request, field, f"the engine does not take this schema: {error.message}") from error


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


_ADDRESS = re.compile(r"https?://([A-Za-z0-9.-]+)(?::\d{1,5})?(?:[/?][A-Za-z0-9\-._~:/?&=%+,;!$'()*]*)?")
"""URLs that all parsers read in the same way: without user part, backslash, fragment, blank or control character."""


def foreign_image(request: ChatRequest, hosts: Collection[str]) -> str:
    """The first image URL of a user that is neither a data URL nor on one of `hosts`; empty if there is none."""
    for message in request.messages:
        if TOOL_MEDIA in message.marks:
            continue
        for part in message.parts:
            if isinstance(part, Image) and _is_foreign(part, hosts):
                return part.url
    return ""


def without_foreign(request: ChatRequest, hosts: Collection[str]) -> ChatRequest:
    """The request with a line of text in the place of each image of a tool that is on another host."""
    messages = tuple(
        msgspec.structs.replace(
            message,
            parts=tuple(
                Text(IMAGE_LINE) if isinstance(part, Image) and _is_foreign(part, hosts) else part
                for part in message.parts
            ),
        )
        if TOOL_MEDIA in message.marks
        else message
        for message in request.messages
    )
    return msgspec.structs.replace(request, messages=messages)


def has_foreign(request: ChatRequest, hosts: Collection[str]) -> bool:
    """Whether a tool returned an image that is on another host."""
    return any(
        isinstance(part, Image) and _is_foreign(part, hosts)
        for message in request.messages
        if TOOL_MEDIA in message.marks
        for part in message.parts
    )


def _is_foreign(image: Image, hosts: Collection[str]) -> bool:
    if image.url[:5].lower() == "data:":
        return False
    match = _ADDRESS.fullmatch(image.url)
    return match is None or match[1].lower() not in hosts
