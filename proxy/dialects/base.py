"""The dialect seam: a wire format becomes typed in one place and knows nothing of engines.

A dialect is one file and one line in `rolltap.proxy.dialects.DIALECTS`. It owns its routes, its parsing, its event
grammar and its error shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rolltap.errors import RolltapError
from rolltap.proxy.conversation.chat import ChatRequest, ReplyEnded, ReplyEvent, ReplyStarted

Action = Literal["generate", "count_tokens", "models", "model", "retrieve"]


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the dialect, as a Starlette pattern, and what a request to it asks for."""

    method: str
    path: str
    action: Action


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request as it came: the route's path parameters, the query, lower-case header names, the whole body."""

    path: str
    path_params: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class WireReply:
    """A whole answer."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class ReplyWriter(Protocol):
    """Writes one streamed reply as bytes. Made once per call; holds the stream's own counters.

    The gateway calls `write` for each event in order. What `write` returns for `ReplyEnded` is the stream's end and
    is sent only when the call is durable.
    """

    content_type: str

    def write(self, event: ReplyEvent) -> bytes:
        """The event's frames, possibly none."""
        ...

    def keep_alive(self) -> bytes:
        """Frames that keep this dialect's clients waiting without changing the reply; may be empty."""
        ...


class Dialect(Protocol):
    """One wire protocol.

    `items_field` is the field of a body whose entries are `ChatRequest.items`. `field_names` maps a field's name in
    `openai_chat` to its name here, where they differ: refusals name the field as the client knows it.
    """

    name: str
    items_field: str
    field_names: Mapping[str, str]
    routes: Sequence[Route]

    def key(self, request: WireRequest) -> str | None:
        """The API key, from where this protocol puts it."""
        ...

    def parse(self, request: WireRequest) -> ChatRequest:
        """The request, typed; `InvalidRequest` names the field that is wrong or unsupported."""
        ...

    def writer(self, request: ChatRequest) -> ReplyWriter:
        """A writer for a streamed reply to `request`."""
        ...

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        """The body of a reply that is not streamed."""
        ...

    def token_count(self, tokens: int) -> bytes:
        """The body of an answer to `count_tokens`."""
        ...

    def models(self, names: Sequence[str], only: str | None) -> bytes:
        """The list of models, or the one called `only`, in this dialect's form."""
        ...

    def error(self, error: RolltapError) -> WireReply:
        """The error in this dialect's own shape, with the status that makes its clients do the right thing."""
        ...
