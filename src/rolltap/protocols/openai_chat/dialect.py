"""OpenAI Chat Completions: `POST /v1/chat/completions` and `GET /v1/models`.

Clients echo tool-call ids, so these carry the handles. `reasoning_content` (or `reasoning`) is read from assistant
messages and written in replies, as DeepSeek, vLLM and SGLang do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rolltap.errors import RolltapError
from rolltap.protocols.base import Dialect, Route, WireReply, WireRequest
from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import ChatRequest, ReplyEnded, ReplyStarted, Sampling, Tool, ToolChoice
from rolltap.protocols.hints import read_hints
from rolltap.protocols.history import Linker, unknown_tool
from rolltap.protocols.openai_chat import wire
from rolltap.protocols.openai_chat.parse import parse_message
from rolltap.protocols.openai_chat.read import ChatReader
from rolltap.protocols.openai_chat.wire import token_limit
from rolltap.protocols.openai_chat.write import ChatWriter, completion
from rolltap.protocols.replies import OPENAI_ENVIRONMENT, openai_error, openai_key
from rolltap.protocols.request_cache import ItemCache, KnownRequest, RequestCache
from rolltap.protocols.requests import MAX_TOOLS, check_depth, cut, decode, invalid
from rolltap.protocols.thinking import EFFORTS, ThinkingDemand, read_switches, switch

MODES = ("none", "auto", "required", "any")
"""`tool_choice` in words; `any` is Mistral's `required`."""


class OpenAIChat(Dialect):
    """The dialect of most harnesses."""

    name = "openai_chat"
    items_field = "messages"
    routes: Sequence[Route] = (
        Route("POST", "/v1/chat/completions", "generate"),
        Route("GET", "/v1/models", "models"),
        Route("GET", "/v1/models/{model:path}", "model"),
    )
    stream_url = "/v1/chat/completions"
    client_environment = OPENAI_ENVIRONMENT
    reply_reader = ChatReader

    def __init__(self, space: CacheSpace) -> None:
        self._known = RequestCache("messages", space)
        self._messages = ItemCache(parse_message, space)
        self._tools = ItemCache(parse_tools, space)
        self._linker = Linker(space)

    def key(self, request: WireRequest) -> str | None:
        return openai_key(request.headers)

    def parse(self, request: WireRequest) -> ChatRequest:
        key = self.key(request)
        match = self._known.extended(key, request.body)
        if match is None:
            entry, former = self._parse_whole(request), None
        else:
            former, added = match
            entry = self._extend(former, added, request)
        self._known.keep(key, entry, former)
        return entry.chat

    def release(self, hashed_key: int) -> None:
        self._known.release(hashed_key)

    def _parse_whole(self, request: WireRequest) -> KnownRequest:
        """Parses a request that extends no known one."""
        body = cut(request.body, ("messages", "tools"))
        head = decode(body.head, wire.Head)
        array = body.array("messages")
        items, messages = self._messages.all(array, "messages")
        if not messages:
            raise invalid("messages", "at least one message is required")
        tools = self._tools.get(body.fields["tools"])[1] if "tools" in body.fields else ()
        linked = self._linker.extend(None, messages, "messages[{}]".format)
        reasoning = head.reasoning
        chat = ChatRequest(
            dialect=self.name,
            model=head.model,
            messages=tuple(linked.messages),
            tools=tools,
            tool_choice=tool_choice(head.tool_choice, head.parallel_tool_calls, tools),
            sampling=sampling(head),
            stream=bool(head.stream),
            hints=read_hints(request.headers, cache_key=head.prompt_cache_key),
            head=body.head,
            items=items,
            fixed=body.fixed("tools"),
            wire={
                "include_usage": bool(head.stream_options and head.stream_options.include_usage),
                "cache_key": head.prompt_cache_key,
                "hides_thinking": head.include_reasoning is False
                or (isinstance(reasoning, wire.ReasoningSwitch) and bool(reasoning.exclude)),
            },
        )
        return KnownRequest(chat, linked, request.body, array)

    def _extend(self, former: KnownRequest, added: Sequence[bytes], request: WireRequest) -> KnownRequest:
        """Parses a request that adds the messages `added` to the history of `former`. Its headers may differ, too."""
        chat = former.chat
        items, messages = self._messages.each(added, "messages", len(chat.items))
        linked = self._linker.extend(former.linked, messages, "messages[{}]".format)
        chat = msgspec.structs.replace(
            chat,
            messages=tuple(linked.messages),
            items=chat.items + items,
            hints=read_hints(request.headers, cache_key=chat.wire["cache_key"]),
        )
        return former.extended(chat, linked, request.body)

    def writer(self, request: ChatRequest) -> ChatWriter:
        return ChatWriter(request)

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        return completion(request, started, ended)

    def error(self, error: RolltapError) -> WireReply:
        return openai_error(error)


def parse_tools(raw: bytes) -> tuple[Tool, ...]:
    """Parses the `tools` field."""
    entries = decode(raw, list[wire.WireTool], "tools")
    if len(entries) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} tools")
    tools = tuple(_tool(entry, f"tools[{index}]") for index, entry in enumerate(entries))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise invalid(f"tools[{index}].{tool.kind}.name", f"a second tool named {tool.name!r}")
        seen.add(tool.name)
    return tools


def _tool(entry: wire.WireTool, where: str) -> Tool:
    if entry.type == "custom":
        if entry.custom is None:
            raise invalid(f"{where}.custom", "this field is required")
        check_depth(entry.custom.format or {}, f"{where}.custom.format")
        return Tool(entry.custom.name, entry.custom.description or "", None, "custom", entry.custom.format)
    if entry.function is None:
        raise invalid(f"{where}.function", "this field is required")
    parameters = entry.function.parameters or {}
    check_depth(parameters, f"{where}.function.parameters")
    return Tool(entry.function.name, entry.function.description or "", parameters)


def tool_choice(choice: str | wire.WireChoice | None, parallel: bool | None, tools: Sequence[Tool]) -> ToolChoice:
    """Parses `tool_choice` and `parallel_tool_calls`. Raises `InvalidRequest` if a named tool is not declared."""
    allow_parallel = parallel is not False
    if isinstance(choice, wire.WireChoice) and choice.type in MODES:
        choice = choice.type
    if choice is None or isinstance(choice, str):
        mode: Any = "required" if choice == "any" else choice or "auto"
        if mode == "required" and not tools:
            raise invalid("tool_choice", "required, but no tools are declared")
        return ToolChoice(mode, parallel=allow_parallel)
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise invalid("tool_choice.allowed_tools", "this field is required")
        names = tuple(
            _declared_name(entry, tools, "tool_choice.allowed_tools.tools") for entry in choice.allowed_tools.tools
        )
        return ToolChoice(choice.allowed_tools.mode if names else "none", names, allow_parallel)
    return ToolChoice("named", (_declared_name(choice, tools, "tool_choice"),), allow_parallel)


def _declared_name(choice: wire.WireChoice, tools: Sequence[Tool], where: str) -> str:
    tool = choice.custom if choice.type == "custom" else choice.function
    if tool is None:
        raise invalid(f"{where}.{choice.type}", "this field is required")
    known = [tool.name for tool in tools]
    if tool.name not in known:
        raise unknown_tool(tool.name, known, f"{where}.{choice.type}.name")
    return tool.name


def sampling(head: wire.Head) -> Sampling:
    """Returns the sampling parameters of a request."""
    if head.top_logprobs and not head.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    stop = (head.stop,) if isinstance(head.stop, str) else tuple(head.stop or ())
    limits = [token_limit(getattr(head, name), name) for name in ("max_completion_tokens", "max_tokens")]
    demand = _demand(head)
    return Sampling(
        temperature=head.temperature,
        top_p=head.top_p,
        top_k=None if head.top_k is None else max(head.top_k, 0),
        min_p=head.min_p,
        max_tokens=limits[0] or limits[1],
        stop=stop,
        seed=head.seed,
        n=head.n or 1,
        presence_penalty=head.presence_penalty,
        frequency_penalty=head.frequency_penalty,
        repetition_penalty=head.repetition_penalty,
        logprobs=bool(head.logprobs),
        top_logprobs=head.top_logprobs or 0,
        thinking=demand.thinking,
        effort=demand.effort,
        thinking_budget=demand.budget,
        keep_thinking=demand.keep,
        json_schema=_schema(head.response_format),
    )


def _demand(head: wire.Head) -> ThinkingDemand:
    asked = head.reasoning
    demand = read_switches(head, head.reasoning_effort)
    if isinstance(asked, wire.ReasoningSwitch):
        demand.think(asked.enabled)
        demand.spend(asked.max_tokens)
        demand.try_hard(asked.effort)
    elif isinstance(asked, str) and asked in EFFORTS:
        demand.try_hard(asked)
    else:
        demand.think(switch(asked, "reasoning"))
    demand.settle()
    return demand


def _schema(spec: wire.ResponseFormat | None) -> dict[str, Any] | None:
    if spec is None or spec.type == "text":
        return None
    if spec.type == "json_object":
        return {}
    if spec.json_schema is None or spec.json_schema.schema is None:
        raise invalid("response_format.json_schema.schema", "this field is required")
    check_depth(spec.json_schema.schema, "response_format.json_schema.schema")
    return spec.json_schema.schema
