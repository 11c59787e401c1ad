"""The dialect seam: a wire format becomes typed in one place and knows nothing of engines.

A dialect is one file (with the helper files that it imports) and one line in `rolltap.proxy.dialects.DIALECTS`. Another
package adds one by an entry point in the group `rolltap.dialects`. A dialect owns its routes, its parsing, its event
grammar and its error shape. Its contract is `tests/contract/test_dialects.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rolltap.errors import NotFound, RolltapError
from rolltap.proxy.conversation.chat import (
    ChatRequest,
    Message,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
)
from rolltap.proxy.dialects.json_request import rebuild
from rolltap.proxy.dialects.model_list import model_list
from rolltap.proxy.dialects.reply_reader import ReplyReader

Action = Literal["generate", "count_tokens", "models", "model", "retrieve"]


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the dialect, as a Starlette pattern, and what a request to it asks for."""

    method: str
    path: str
    action: Action


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request as it came: the route's path parameters, the query, lower-case header names, the whole body.

    `route` is the pattern of the route that took it.
    """

    path: str
    path_params: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    method: str = "POST"
    route: str = ""


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


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call on record: its request, parsed again, and its reply."""

    request: ChatRequest
    reply: Message


FindCall = Callable[[str], Awaitable[RecordedCall | None]]
"""Finds the call that a handle names; None if this session did not make it."""


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """The environment variables by which the dialect's usual clients find a server: base URL (plus `path`) and key."""

    base_url: str
    path: str
    key: str


class Dialect(Protocol):
    """One wire protocol. A subclass sets the attributes without a value and defines the methods without a body.

    `items_field`: the field of a body whose entries are `ChatRequest.items`. `stream_url`: path and query of a streamed
    model call, with `{model}` where the protocol has the model's name in its URL. `field_names`: from a field's name in
    `openai_chat` to its name here, where they differ; refusals name the field as the client knows it. `reply_reader`
    makes a reader of the vendor's replies; None: calls of this dialect are never passed through to a vendor.
    """

    name: str
    items_field: str
    routes: Sequence[Route]
    stream_url: str
    field_names: Mapping[str, str] = {}
    client_environment: ClientEnvironment | None = None
    reply_reader: Callable[[], ReplyReader] | None = None

    def key(self, request: WireRequest) -> str | None:
        """The API key, from where this protocol puts it."""
        ...

    def parse(self, request: WireRequest) -> ChatRequest:
        """The request, typed; `InvalidRequest` names the field that is wrong or unsupported.

        Long bodies are parsed in a thread of their own, beside others in the event loop: a dialect that keeps anything
        from one request for the next guards it (`cache_space` does).
        """
        ...

    def parse_recorded(self, head: bytes, items: Sequence[bytes], fixed: Mapping[str, bytes]) -> ChatRequest:
        """A request out of what the call log keeps of it (`ChatRequest.head`, `items`, `fixed`)."""
        return self.parse(WireRequest("", {}, {}, {}, rebuild(self.items_field, head, items, fixed)))

    async def recall(self, request: ChatRequest, find: FindCall) -> ChatRequest:
        """The request with every recorded reply that it only names in place; `InvalidRequest` for an unknown one."""
        return request

    def writer(self, request: ChatRequest) -> ReplyWriter:
        """A writer for a streamed reply to `request`."""
        ...

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        """The body of a reply that is not streamed."""
        ...

    def token_count(self, tokens: int) -> bytes:
        """The body of an answer to `count_tokens`, for a dialect that has a route with that action."""
        raise NotFound(f"{self.name} has no route that counts tokens")

    def models(self, names: Sequence[str], only: str | None) -> bytes:
        """The list of models, or the one called `only`, in this dialect's form; `NotFound` for an unknown one."""
        return model_list(names, only)

    def error(self, error: RolltapError) -> WireReply:
        """The error in this dialect's own shape, with the status that makes its clients do the right thing."""
        ...
