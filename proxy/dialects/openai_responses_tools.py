"""The tools of a Responses request, with their namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolltap.proxy.conversation.chat import Tool, ToolChoice
from rolltap.proxy.dialects import openai_responses_wire as wire
from rolltap.proxy.dialects.history import unknown_tool
from rolltap.proxy.dialects.json_request import MAX_TOOLS, check_depth, invalid

DEFAULT_NAMESPACE = "functions"

DROPPED_TOOLS = frozenset(
    {"web_search", "web_search_preview", "web_search_2025_08_26", "tool_search", "image_generation", "local_shell"}
)
"""Tools that harnesses declare by default and do without: the model is not told of them. Forcing one is refused."""


@dataclass(frozen=True, slots=True)
class ResponsesToolSet:
    """Tools as the model sees them; `namespaces` has the wire's (namespace, name) of those that came in one."""

    tools: tuple[Tool, ...] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def with_more(self, more: ResponsesToolSet) -> ResponsesToolSet:
        """These tools and more; one of the same name takes the former's place."""
        merged = {tool.name: tool for tool in (*self.tools, *more.tools)}
        return ResponsesToolSet(tuple(merged.values()), {**self.namespaces, **more.namespaces})


def tool_name(namespace: str | None, name: str) -> str:
    """A tool's name as the model sees it."""
    return name if namespace in (None, "", DEFAULT_NAMESPACE) else f"{namespace}.{name}"


def parse_tools(entries: Sequence[wire.WireTool], where: str) -> ResponsesToolSet:
    """A list of tools; refuses a name that comes twice and a tool that nobody here can run."""
    tools: dict[str, Tool] = {}
    namespaces: dict[str, tuple[str, str]] = {}

    def take(entry: wire.WireTool, place: str, namespace: wire.WireTool | None) -> None:
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
                take(member, f"{place}.tools[{inner}]", entry)
        else:
            take(entry, place, None)
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
    """`tool_choice` and `parallel_tool_calls`; every tool named must be declared."""
    together = parallel is not False
    match choice:
        case None | "auto":
            return ToolChoice("auto", parallel=together)
        case "none":
            return ToolChoice("none", parallel=together)
        case "required":
            if not tools.tools:
                raise invalid("tool_choice", "required, but no tools are declared")
            return ToolChoice("required", parallel=together)
        case wire.WireChoice(type="allowed_tools"):
            allowed = [entry for entry in choice.tools or () if entry.type not in DROPPED_TOOLS]
            names = tuple(_chosen(entry, tools, "tool_choice.tools") for entry in allowed)
            return ToolChoice((choice.mode or "auto") if names else "none", names, together)
        case wire.WireChoice():
            return ToolChoice("named", (_chosen(choice, tools, "tool_choice"),), together)
    raise invalid("tool_choice", "want none, auto, required or an object")


def _chosen(choice: wire.WireChoice, tools: ResponsesToolSet, where: str) -> str:
    if choice.type not in ("function", "custom"):
        raise invalid(f"{where}.type", f"a tool of type {choice.type!r} can't be forced here; use function or custom")
    name = tool_name(choice.namespace, choice.name or "")
    known = [tool.name for tool in tools.tools]
    if name not in known:
        raise unknown_tool(name, known, f"{where}.name")
    return name
