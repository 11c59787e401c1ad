"""The dialect Protocol: a dialect parses a wire format to types, and does not depend on engines.

A dialect is a package (or a file) and one line in `rolltap.protocols.dialects.DIALECTS`. Another distribution adds one
by an entry point in the group `rolltap.dialects`. A dialect owns its routes, its parsing, its event grammar and its
error shape. Its contract is `tests/contract/test_dialects.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from msgspec.json import encode

from rolltap.errors import NotFound, RolltapError
from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import ChatRequest, Choice, Message, ReplyEnded, ReplyEvent, ReplyStarted, Usage
from rolltap.protocols.requests import rebuild

NO_CONTEXTS: Mapping[str, int] = {}

Action = Literal["generate", "count_tokens", "models", "model", "retrieve"]


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the dialect, as a Starlette pattern, and the action that it requests."""

    method: str
    path: str
    action: Action


@dataclass(frozen=True, slots=True)
class WireRequest:
    """An HTTP request before it is parsed: path parameters, query, headers (lower-case names) and the whole body.

    `route` is the pattern of the route that matched.
    """

    path: str
    path_params: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    method: str = "POST"
    route: str = ""

    def body_hash(self) -> str:
        """SHA-256 of what is asked: the body, and the route, path parameters and query (Gemini's model, method, `alt`).

        Keys are left out: the session's in the path prefix, Gemini's in the query.
        """
        params = sorted((name, value) for name, value in self.path_params.items() if name != "session")
        query = sorted((name, value) for name, value in self.query.items() if name != "key")
        hashed = hashlib.sha256(msgspec.json.encode((self.route, params, query)))
        hashed.update(self.body)
        return hashed.hexdigest()


@dataclass(frozen=True, slots=True)
class WireReply:
    """A complete HTTP reply."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class ReplyWriter(Protocol):
    """Writes one streamed reply as bytes. There is one writer per call; it holds the stream's counters.

    The gateway calls `write` for each event in order. The bytes for `ReplyEnded` end the stream. They are sent only
    after the call is durable.
    """

    content_type: str

    def write(self, event: ReplyEvent) -> bytes:
        """Returns the event as bytes of the stream; may be empty."""
        ...

    def keep_alive(self) -> bytes:
        """Returns bytes that keep the client from timing out and do not change the reply; may be empty."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call: its request, parsed again, and its reply."""

    request: ChatRequest
    reply: Message


FindCall = Callable[[str], Awaitable[RecordedCall | None]]
"""Returns the call that a handle names; None if this session has no such call."""


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """Environment variables that the dialect's usual clients read: the base URL (plus `path`) and the API key."""

    base_url: str
    path: str
    key: str


class ReplyReader(Protocol):
    """Reads one reply of a vendor in the dialect's own wire format, for the record of a passthrough call.

    `closing`: clients may take the data so far as the end of the reply. `ended`: the reply is complete. `error`: the
    vendor's error inside a reply that began well. `usage`: None if the vendor sent none. All methods may raise
    `msgspec.MsgspecError` and `InvalidRequest` for an unreadable reply.
    """

    closing: bool
    ended: bool
    error: str
    usage: Usage | None

    def event(self, data: bytes) -> None:
        """Reads the data of a server-sent event."""
        ...

    def whole(self, body: bytes) -> None:
        """Reads a reply that is not streamed."""
        ...

    def choice(self) -> Choice:
        """Returns the message so far; of several choices the first.

        The dialect parses the same message when the harness sends the reply back. So the next call finds this one.
        """
        ...


def make_choice(message: Message, finish: str) -> Choice:
    """Returns a choice. Its finish is `tool_calls` if the message has tool calls and was not cut off."""
    if message.tool_calls and finish == "stop":
        finish = "tool_calls"
    return Choice(message, finish)  # type: ignore[arg-type]


class Dialect(Protocol):
    """One wire protocol. Subclasses set the attributes that have no value here and define the methods that have no
    body.

    `items_field`: the body's field whose entries are `ChatRequest.items`. `stream_url` (for the contract suite): path
    and query of a streamed model call, with `{model}` where the protocol has the model's name in its URL.
    `field_names`: maps a field's name in `openai_chat` to its name here, where they differ; error messages use the
    client's name. `reply_reader` creates a reader for the vendor's replies; None: calls of this dialect are never
    passed through to a vendor.
    """

    name: str
    items_field: str
    routes: Sequence[Route]
    stream_url: str
    field_names: Mapping[str, str] = {}
    client_environment: ClientEnvironment | None = None
    reply_reader: Callable[[], ReplyReader] | None = None

    def __init__(self, space: CacheSpace) -> None:
        """`space` limits what the dialect keeps between requests."""

    def key(self, request: WireRequest) -> str | None:
        """Returns the API key from the place where this protocol has it."""
        ...

    def parse(self, request: WireRequest) -> ChatRequest:
        """Parses the request. Raises `InvalidRequest`, which names the wrong or unsupported field.

        May run concurrently: long bodies are parsed in a thread, short ones on the event loop. A dialect that keeps
        state between requests must guard it (`cache_space` does).
        """
        ...

    def parse_recorded(self, head: bytes, items: Sequence[bytes], fixed: Mapping[str, bytes]) -> ChatRequest:
        """Parses a request from its parts in the call log (`ChatRequest.head`, `items`, `fixed`)."""
        return self.parse(WireRequest("", {}, {}, {}, rebuild(self.items_field, head, items, fixed)))

    def release(self, hashed_key: int) -> None:
        """Drops what is kept for the next request of an API key, given by its `hash`: its session has ended."""

    async def recall(self, request: ChatRequest, find: FindCall) -> ChatRequest:
        """Inserts the recorded replies that the request only names. Raises `InvalidRequest` for an unknown one."""
        return request

    def writer(self, request: ChatRequest) -> ReplyWriter:
        """Returns a writer for a streamed reply to `request`."""
        ...

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        """Returns the body of a reply that is not streamed."""
        ...

    def token_count(self, tokens: int) -> bytes:
        """Returns the body of a `count_tokens` reply. Raises `NotFound` if the dialect has no such route."""
        raise NotFound(f"{self.name} has no route that counts tokens")

    def models(self, names: Sequence[str], only: str | None, contexts: Mapping[str, int] = NO_CONTEXTS) -> bytes:
        """Returns the list of models, or the model `only`, in this dialect's form. Raises `NotFound`.

        `contexts`: their context lengths, where these are known.
        """
        return model_list(names, only, contexts)

    def error(self, error: RolltapError) -> WireReply:
        """Renders the error in this dialect's shape, with the status that its clients handle correctly."""
        ...


CONTEXT_FIELDS = (
    *("max_model_len", "context_length", "context_window", "max_context_length"),
    *("max_input_tokens", "max_tokens", "inputTokenLimit", "outputTokenLimit"),
)
"""The names of the context length, as clients read what their server says:

| field | whose |
|---|---|
| `max_model_len` | vLLM, SGLang |
| `context_length`, `top_provider.context_length` | OpenRouter, Together, LM Studio |
| `context_window` | Groq |
| `max_context_length` | Mistral |
| `max_input_tokens`, `max_tokens` | Anthropic |
| `inputTokenLimit`, `outputTokenLimit` | Gemini |

A reply may be as long as the context allows, so the limit of a reply is the same number."""


def model_list(names: Sequence[str], only: str | None, contexts: Mapping[str, int] = NO_CONTEXTS) -> bytes:
    """Returns the body of `GET /v1/models`, or the model `only`. Raises `NotFound` for an unknown one.

    The path is one in three protocols: the reply has the fields of all of them.
    """
    if only is not None and only not in names:
        raise NotFound(f"the model {only!r} is not served here; served: {', '.join(names)}", param="model")
    if only is not None:
        return encode(_model(only, contexts.get(only)))
    data = [_model(name, contexts.get(name)) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
    return encode({"object": "list", "data": data, "has_more": False, **ends, "models": data})


def _model(name: str, context: int | None) -> dict[str, object]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "rolltap"}
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    gemini = {"name": f"models/{name}", "displayName": name, "version": "1", "supportedGenerationMethods": methods}
    lengths: dict[str, object] = {}
    if context is not None:
        lengths = {**dict.fromkeys(CONTEXT_FIELDS, context), "top_provider": {"context_length": context}}
    return {**openai, **anthropic, **gemini, **lengths}
