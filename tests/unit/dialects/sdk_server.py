"""A server that holds nothing but the dialects and a scripted reply, and the vendors' own clients of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pytest
import uvicorn
from google import genai
from google.genai import types as genai_types
from starlette.routing import compile_path

from rolltap.errors import RolltapError
from rolltap.protocols.base import Dialect, Route, WireReply, WireRequest
from rolltap.protocols.conversation import (
    ChatRequest,
    Choice,
    Message,
    Reasoning,
    ReasoningDelta,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
    Text,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from rolltap.proxy.planes.agent import wire_request
from tests.dialects import DIALECTS

CALL_ID = "01jd0000000000000001"
HANDLE = f"call_{CALL_ID}zzabcdefghjkmn"
FIRST, SECOND = f"call_{CALL_ID}00pqrstvwxyz01", f"call_{CALL_ID}01pqrstvwxyz02"
ARGUMENTS = '{\n  "place": "shed"\n}'
REPLY = Message(
    "assistant",
    (Reasoning("Two places."), Text("I look.")),
    (ToolCall(FIRST, "look", ARGUMENTS), ToolCall(SECOND, "look", "{}")),
    handle=HANDLE,
)
USAGE = Usage(prompt=40, output=12, cached=30, reasoning=5)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"place": {"type": "string"}}}


def events(choice: Choice) -> Iterator[ReplyEvent]:
    """A streamed reply that ends in `choice`, in small pieces."""
    message = choice.message
    yield ReplyStarted(CALL_ID, 1_700_000_000, "gardener", USAGE.prompt, HANDLE)
    yield from (ReasoningDelta(character) for character in message.reasoning)
    yield from (TextDelta(character) for character in message.text)
    for position, call in enumerate(message.tool_calls):
        yield ToolCallStarted(position, call.id, call.name, call.kind)
        yield from (ToolCallDelta(position, character) for character in call.arguments)
        yield ToolCallEnded(position)
    yield ReplyEnded((choice,), USAGE)


@dataclass
class Server:
    """An ASGI application that answers model calls with `choice`, or with `errors` while there are any."""

    choice: Choice = field(default_factory=lambda: Choice(REPLY, "tool_calls"))
    errors: list[RolltapError] = field(default_factory=list)
    seen: list[ChatRequest] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        dialect, route, params = self._route(scope)
        wire = wire_request(scope, params, body)
        assert dialect.key(wire) == "sk-garden"
        try:
            reply = self._answer(dialect, route, wire)
        except RolltapError as error:
            reply = dialect.error(error)
        headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    def _answer(self, dialect: Dialect, route: Route, wire: WireRequest) -> WireReply:
        content = {"content-type": "application/json"}
        if route.action in ("models", "model"):
            return WireReply(200, dialect.models(["gardener"], wire.path_params.get("model")), content)
        chat = dialect.parse(wire)
        self.seen.append(chat)
        if self.errors:
            raise self.errors.pop(0)
        if route.action == "count_tokens":
            return WireReply(200, dialect.token_count(40), content)
        if chat.stream:
            writer = dialect.writer(chat)
            data = b"".join(writer.keep_alive() + writer.write(event) for event in events(self.choice))
            return WireReply(200, data, {"content-type": writer.content_type})
        started, *_, ended = events(self.choice)
        assert isinstance(started, ReplyStarted)
        assert isinstance(ended, ReplyEnded)
        return WireReply(200, dialect.reply(chat, started, ended), content)

    def _route(self, scope: Any) -> tuple[Dialect, Route, dict[str, str]]:
        for dialect in DIALECTS.values():
            for route in dialect.routes:
                match = compile_path(route.path)[0].match(scope["path"])
                if match and route.method == scope["method"]:
                    return dialect, route, match.groupdict()
        raise AssertionError(f"no dialect serves {scope['method']} {scope['path']}")


class Switch:
    """Hands requests to the server of the test that runs."""

    current: Server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.current(scope, receive, send)


@pytest.fixture(scope="module")
def switch() -> Switch:
    return Switch()


@pytest.fixture(scope="module")
def url(switch: Switch) -> Iterator[str]:
    """Where the dialects are served, on a free port. The socket listens before the server runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(switch, lifespan="off", log_level="error", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def server(switch: Switch) -> Server:
    switch.current = Server()
    return switch.current


@pytest.fixture
def openai_client(url: str, server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="sk-garden", base_url=f"{url}/v1", max_retries=1) as client:
        yield client


@pytest.fixture
def anthropic_client(url: str, server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(api_key="sk-garden", base_url=url, max_retries=1) as client:
        yield client


@pytest.fixture
def gemini_client(url: str, server: Server) -> Iterator[genai.Client]:
    with genai.Client(api_key="sk-garden", http_options=genai_types.HttpOptions(base_url=url)) as client:
        yield client
