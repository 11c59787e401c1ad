"""Anthropic Messages: `POST /v1/messages` and `/v1/messages/count_tokens`.

Clients echo `tool_use` ids and thinking signatures, so these carry the handles. A user message's tool results become
tool messages, in the order of its blocks.

* The first system block of Claude Code, `x-anthropic-billing-header: ...`, is a header: it is removed from the prompt.
* LiteLLM cannot send an empty text: its `EMPTY_TEXT` in an assistant message is read as no text.
* Vendor-hosted tools that clients declare by default (`DROPPED_TOOLS`) are left out of the prompt. Other tools that
  only the vendor defines are refused.
* A tool with `defer_loading` is left out of the prompt's tools. When a `tool_reference` in a tool result names it, its
  definition is inserted there as text, so that the prompt before it does not change. If the request declares the
  vendor's tool search (which rolltap does not run), no tool is deferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolltap.errors import RolltapError
from rolltap.protocols.anthropic import wire
from rolltap.protocols.anthropic.parse import parse_entry, parse_system
from rolltap.protocols.anthropic.read import MessagesReader
from rolltap.protocols.anthropic.write import MessagesWriter, anthropic_error, message_body
from rolltap.protocols.base import ClientEnvironment, Dialect, Route, WireReply, WireRequest
from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import ChatRequest, Message, ReplyEnded, ReplyStarted, Sampling, Tool, ToolChoice
from rolltap.protocols.hints import read_hints
from rolltap.protocols.history import Linker, unknown_tool
from rolltap.protocols.openai_chat.wire import token_limit
from rolltap.protocols.replies import bearer, encode
from rolltap.protocols.request_cache import ItemCache
from rolltap.protocols.requests import MAX_TOOLS, check_depth, cut, decode, invalid
from rolltap.protocols.thinking import ThinkingDemand

DROPPED_TOOLS = ("web_search_", "web_fetch_")
TOOL_SEARCH = "tool_search_tool_"


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The prompt's tools, and the deferred tools, which wait for a `tool_reference`."""

    tools: tuple[Tool, ...] = ()
    deferred: Mapping[str, Tool] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools] + list(self.deferred)


class Anthropic(Dialect):
    """The dialect of Claude Code."""

    name = "anthropic"
    items_field = "messages"
    field_names: Mapping[str, str] = {
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
    }
    routes: Sequence[Route] = (
        Route("POST", "/v1/messages", "generate"),
        Route("POST", "/v1/messages/count_tokens", "count_tokens"),
    )
    stream_url = "/v1/messages"
    client_environment = ClientEnvironment("ANTHROPIC_BASE_URL", "", "ANTHROPIC_API_KEY")
    reply_reader = MessagesReader

    def __init__(self, space: CacheSpace) -> None:
        self._entries = ItemCache(lambda raw: parse_entry(raw, {}), space)
        self._tools = ItemCache(parse_tools, space)
        self._system = ItemCache(parse_system, space)
        self._linker = Linker(space)

    def key(self, request: WireRequest) -> str | None:
        return request.headers.get("x-api-key") or bearer(request.headers)

    def parse(self, request: WireRequest) -> ChatRequest:
        body = cut(request.body, ("messages", "system", "tools"))
        head = decode(body.head, wire.Head)
        generates = not request.path.endswith("/count_tokens")
        if head.max_tokens is None and generates:
            raise invalid("max_tokens", "this field is required")
        items, entries = self._entries.all(body.array("messages"), "messages")
        tools = self._tools.get(body.fields["tools"])[1] if "tools" in body.fields else ToolSet()
        messages: list[Message] = []
        places: list[str] = []
        if "system" in body.fields and (system := self._system.get(body.fields["system"])[1]) is not None:
            messages.append(system)
            places.append("system")
        for index, entry in enumerate(entries):
            if entry.references:
                entry = parse_entry(items[index], tools.deferred)
            messages += entry.messages
            places += [f"messages[{index}]"] * len(entry.messages)
        if not entries:
            raise invalid("messages", "at least one message is required")
        if messages[-1].role == "assistant" and generates:
            raise invalid(places[-1], "prefill is not supported; the conversation must end with a user message")
        return ChatRequest(
            dialect=self.name,
            model=head.model,
            messages=self._linker.link(messages, places.__getitem__),
            tools=tools.tools,
            tool_choice=tool_choice(head.tool_choice, tools),
            sampling=sampling(head),
            stream=bool(head.stream),
            remarks=remarks(head),
            hints=read_hints(request.headers, user_id=head.metadata.user_id if head.metadata else None),
            head=body.head,
            items=items,
            fixed=body.fixed("system", "tools"),
            wire={"names": {"response_format": "output_format"}} if head.output_format is not None else {},
        )

    def writer(self, request: ChatRequest) -> MessagesWriter:
        return MessagesWriter(request)

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        return message_body(request, started, ended)

    def token_count(self, tokens: int) -> bytes:
        return encode({"input_tokens": tokens})

    def error(self, error: RolltapError) -> WireReply:
        return anthropic_error(error)


def parse_tools(raw: bytes) -> ToolSet:
    """Parses the `tools` field."""
    entries = decode(raw, list[wire.WireTool], "tools")
    if len(entries) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} tools")
    searches = any((entry.type or "").startswith(TOOL_SEARCH) for entry in entries)
    tools: dict[str, Tool] = {}
    deferred: dict[str, Tool] = {}
    for index, entry in enumerate(entries):
        if (entry.type or "").startswith((*DROPPED_TOOLS, TOOL_SEARCH)):
            continue
        tool = _tool(entry, f"tools[{index}]")
        if tool.name in tools or tool.name in deferred:
            raise invalid(f"tools[{index}].name", f"a second tool named {tool.name!r}")
        (deferred if entry.defer_loading and not searches else tools)[tool.name] = tool
    return ToolSet(tuple(tools.values()), deferred)


def _tool(entry: wire.WireTool, where: str) -> Tool:
    if entry.type not in (None, "custom"):
        raise invalid(f"{where}.type", f"tools of type {entry.type!r} are not supported; declare one with input_schema")
    if entry.name is None:
        raise invalid(f"{where}.name", "this field is required")
    if entry.input_schema is None:
        raise invalid(f"{where}.input_schema", "this field is required")
    check_depth(entry.input_schema, f"{where}.input_schema")
    return Tool(entry.name, entry.description or "", entry.input_schema)


def tool_choice(choice: wire.WireChoice | None, tools: ToolSet) -> ToolChoice:
    """Parses `tool_choice`. Raises `InvalidRequest` if a named tool is not declared."""
    if choice is None:
        return ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name not in tools.names:
            raise unknown_tool(choice.name or "", tools.names, "tool_choice.name")
        return ToolChoice("named", (choice.name,), parallel)
    if choice.type == "any" and not tools.tools:
        raise invalid("tool_choice", "any, but no tools are declared")
    mode: Any = "required" if choice.type == "any" else choice.type
    return ToolChoice(mode, parallel=parallel)


def sampling(head: wire.Head) -> Sampling:
    """Returns the sampling parameters of a request."""
    config, demand = head.output_config or wire.OutputConfig(), ThinkingDemand()
    form = config.format or head.output_format
    if form is not None:
        check_depth(form.schema, "output_config.format.schema")
    if head.thinking is not None:
        demand.think(head.thinking.type != "disabled")
        demand.spend(head.thinking.budget_tokens)
    demand.try_hard(config.effort)
    return Sampling(
        temperature=head.temperature,
        top_p=head.top_p,
        top_k=head.top_k,
        max_tokens=token_limit(head.max_tokens, "max_tokens"),
        stop=tuple(head.stop_sequences or ()),
        thinking=False if demand.thinking is None and demand.effort == "none" else demand.thinking,
        effort=demand.effort,
        thinking_budget=demand.budget,
        json_schema=form.schema if form is not None else None,
    )


def remarks(head: wire.Head) -> tuple[str, ...]:
    """What the request asks of the vendor's server and is not done here."""
    edits = head.context_management.edits if head.context_management is not None else ()
    names = {
        "task_budget": head.output_config is not None and head.output_config.task_budget is not None,
        "context_management": any(edit.type == "clear_tool_uses_20250919" for edit in edits),
    }
    return tuple(name for name, is_asked in names.items() if is_asked)
