"""Parses the tools of a Responses request, with their namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolltap.proxy.conversation.chat import Tool, ToolChoice
from rolltap.proxy.dialects import openai_responses_wire as wire
from rolltap.proxy.dialects.history import unknown_tool
from rolltap.proxy.dialects.json_request import MAX_TOOLS, check_depth, invalid

MODES = ("none", "auto", "required", "any")

DEFAULT_NAMESPACE = "functions"

DROPPED_TOOLS = frozenset(
    {"web_search", "web_search_preview", "web_search_2025_08_26", "tool_search", "image_generation", "local_shell"}
)
"""Tools that harnesses declare by default and do not depend on: the model does not see them. Forcing one is refused."""


@dataclass(frozen=True, slots=True)
class ResponsesToolSet:
    """Tools as the model sees them. `namespaces`: the wire's (namespace, name) of each tool that is in a namespace."""

    tools: tuple[Tool, ...] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def with_more(self, more: ResponsesToolSet) -> ResponsesToolSet:
        """Returns these tools and more. A later tool of the same name replaces the earlier one."""
        merged = {tool.name: tool for tool in (*self.tools, *more.tools)}
        return ResponsesToolSet(tuple(merged.values()), {**self.namespaces, **more.namespaces})


def tool_name(namespace: str | None, name: str) -> str:
    """Returns a tool's name as the model sees it."""
    return name if namespace in (None, "", DEFAULT_NAMESPACE) else f"{namespace}.{name}"


def parse_tools(entries: Sequence[wire.WireTool], where: str) -> ResponsesToolSet:
    """Parses a list of tools. Raises `InvalidRequest` for a repeated name, and for a tool that nobody here can run."""
    tools: dict[str, Tool] = {}
    namespaces: dict[str, tuple[str, str]] = {}

    def add(entry: wire.WireTool, place: str, namespace: wire.WireTool | None) -> None:
        tool = _tool(entry, place, namespace)
        if tool.name in tools:
            raise invalid(f"{place}.name", f"a second tool named {tool.name!r}")
        if len(tools) == MAX_TOOLS:
            raise invalid(where, f"at most {MAX_TOOLS} tools")
        tools[tool.name] = tool
        if namespace is not None:
            namespaces[tool.name] = (namespace.name or "", entry.name or "")

    for index, entry in enumerate(entries):
        place = f"{where}[{index}]"
        if entry.type in DROPPED_TOOLS:
            continue
        if entry.type == "namespace":
            if not entry.name:
                raise invalid(f"{place}.name", "this field is required")
            for inner, member in enumerate(entry.tools or ()):
                add(member, f"{place}.tools[{inner}]", entry)
        else:
            add(entry, place, None)
    return ResponsesToolSet(tuple(tools.values()), namespaces)


def _tool(entry: wire.WireTool, place: str, namespace: wire.WireTool | None) -> Tool:
    if entry.type not in ("function", "custom"):
        raise invalid(f"{place}.type", f"tools of type {entry.type!r} are not supported; use function or custom")
    if not entry.name:
        raise invalid(f"{place}.name", "this field is required")
    name = tool_name(namespace.name if namespace else None, entry.name)
    texts = [namespace.description if namespace else None, entry.description]
    description = "\n\n".join(text for text in texts if text)
    if entry.type == "custom":
        check_depth(entry.format or {}, f"{place}.format")
        return Tool(name, description, None, "custom", entry.format)
    check_depth(entry.parameters or {}, f"{place}.parameters")
    return Tool(name, description, entry.parameters or {})


def tool_choice(choice: str | wire.WireChoice | None, parallel: bool | None, tools: ResponsesToolSet) -> ToolChoice:
    """Parses `tool_choice` and `parallel_tool_calls`. Raises `InvalidRequest` if a named tool is not declared."""
    allow_parallel = parallel is not False
    if isinstance(choice, wire.WireChoice) and choice.type in MODES:
        choice = choice.type
    match choice:
        case None | "auto":
            return ToolChoice("auto", parallel=allow_parallel)
        case "none":
            return ToolChoice("none", parallel=allow_parallel)
        case "required" | "any":
            if not tools.tools:
                raise invalid("tool_choice", "required, but no tools are declared")
            return ToolChoice("required", parallel=allow_parallel)
        case wire.WireChoice(type="allowed_tools"):
            allowed = [entry for entry in choice.tools or () if entry.type not in DROPPED_TOOLS]
            names = tuple(_declared_name(entry, tools, "tool_choice.tools") for entry in allowed)
            return ToolChoice((choice.mode or "auto") if names else "none", names, allow_parallel)
        case wire.WireChoice():
            return ToolChoice("named", (_declared_name(choice, tools, "tool_choice"),), allow_parallel)
    raise invalid("tool_choice", "expected none, auto, required or an object")


def _declared_name(choice: wire.WireChoice, tools: ResponsesToolSet, where: str) -> str:
    if choice.type not in ("function", "custom"):
        raise invalid(f"{where}.type", f"a tool of type {choice.type!r} can't be forced here; use function or custom")
    name = tool_name(choice.namespace, choice.name or "")
    known = [tool.name for tool in tools.tools]
    if name not in known:
        raise unknown_tool(name, known, f"{where}.name")
    return name
