"""Parses `instructions` and entries of `input` into canonical messages, and the tools of a request.

An assistant turn is several items (reasoning, message, calls). Each is parsed to a `ContentPiece`; `join_pieces` makes
one message of them. Tools may have namespaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rolltap.protocols.contents import attachment, check_arguments, file_type, image_part
from rolltap.protocols.conversation import Message, Part, Reasoning, Text, Tool, ToolCall, ToolChoice
from rolltap.protocols.handles import PREFIX
from rolltap.protocols.history import unknown_tool
from rolltap.protocols.openai_responses import wire
from rolltap.protocols.openai_responses.recall import ITEM_PREFIX, compaction
from rolltap.protocols.requests import MAX_TOOLS, check_depth, decode, invalid

REASONING, TEXT, CALL = range(3)

ENCRYPTED = "gAAAA"
"""The beginning of what the vendor encrypted. Other "encrypted" text is our model's: an argument that it wrote and the
harness takes for encrypted."""

UNREADABLE = "[encrypted text, which this model can't read]"
"""Stands for text that the vendor encrypted."""


class ContentPiece(msgspec.Struct, frozen=True):
    """An item of an assistant turn. The order is reasoning, text, calls; text may also follow a call."""

    rank: int
    parts: tuple[Part, ...] = ()
    call: ToolCall | None = None
    handle: str | None = None
    recall: bool = False

    @property
    def is_empty(self) -> bool:
        """True for a message without text, or reasoning without text, that is not a reply of ours, which may have none.

        Some clients put these between other items; they are skipped.
        """
        handles = [self.handle, *(part.handle for part in self.parts if isinstance(part, Reasoning))]
        is_ours = any(PREFIX in (handle or "") for handle in handles)
        has_text = any(not isinstance(part, Reasoning) or part.text for part in self.parts)
        return self.rank != CALL and not has_text and not self.recall and not is_ours


@dataclass(frozen=True, slots=True)
class EffortUpdate:
    """Another effort for the turns that follow."""

    effort: str | bool | None


@dataclass(frozen=True, slots=True)
class ResponsesToolSet:
    """Tools as the model sees them. `namespaces`: the wire's (namespace, name) of each tool that is in a namespace."""

    tools: tuple[Tool, ...] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def with_more(self, more: ResponsesToolSet) -> ResponsesToolSet:
        """Returns these tools and more. A later tool of the same name replaces the earlier one."""
        merged = {tool.name: tool for tool in (*self.tools, *more.tools)}
        return ResponsesToolSet(tuple(merged.values()), {**self.namespaces, **more.namespaces})


ParsedItem = Message | ContentPiece | ResponsesToolSet | EffortUpdate | wire.CompactionTrigger


def parse_instructions(raw: bytes) -> Message:
    return Message("system", (Text(decode(raw, str, "instructions")),))


def parse_item(raw: bytes) -> ParsedItem:
    """Parses an entry of `input`."""
    kind: Any = wire.Item if decode(raw, wire.ItemKind).type is not None else wire.MessageItem
    match decode(raw, kind):
        case wire.MessageItem() as item if item.role == "assistant":
            return ContentPiece(TEXT, _parts(item.content, "content"), handle=item.id)
        case wire.MessageItem() as item:
            takes: Any = "media" if item.role == "user" else "text"
            return Message(item.role, _parts(item.content, "content", takes=takes))
        case wire.ReasoningItem() as item:
            text_parts = item.content or item.summary
            text = "\n\n".join(part.text for part in text_parts)
            return ContentPiece(REASONING, (Reasoning(text, item.encrypted_content or item.id),), handle=item.id)
        case wire.FunctionCallItem() as item:
            arguments = check_arguments(item.arguments, "arguments")
            return ContentPiece(CALL, call=ToolCall(item.call_id, tool_name(item.namespace, item.name), arguments))
        case wire.CustomCallItem() as item:
            call = ToolCall(item.call_id, tool_name(item.namespace, item.name), item.input, "custom")
            return ContentPiece(CALL, call=call)
        case wire.FunctionOutputItem() | wire.CustomOutputItem() as item:
            return Message("tool", _parts(item.output, "output", takes="results"), tool_call_id=item.call_id)
        case wire.AdditionalToolsItem() as item:
            return parse_tools(item.tools, "tools")
        case wire.AgentMessageItem() as item:
            return Message("user", _parts(item.content, "content", takes="media"))
        case wire.ConfigurationUpdate() as item:
            return EffortUpdate(item.reasoning.effort if item.reasoning is not None else None)
        case wire.CompactionItem() | wire.CompactionSummaryItem() as item:
            return compaction(item.encrypted_content or item.id or "")
        case wire.CompactionTrigger() as item:
            return item
        case wire.ItemReference() as item if item.id.startswith(ITEM_PREFIX):
            return compaction(item.id)
        case wire.ItemReference() as item:
            rank = {"rs": REASONING, "msg": TEXT}.get(item.id.partition("_")[0], CALL)
            return ContentPiece(rank, handle=item.id, recall=True)
    raise invalid("type", "this item is not supported")


def _parts(
    content: str | list[wire.ContentPart], where: str, *, takes: Literal["text", "media", "results"] = "text"
) -> tuple[Part, ...]:
    """Content as parts. A message takes text only, or a user's media, or what a tool returned."""
    if isinstance(content, str):
        return (Text(content),) if content else ()
    out: list[Part] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        match part:
            case wire.InputText(text) | wire.OutputText(text) | wire.PlainText(text) | wire.Refusal(text):
                out.append(Text(text))
            case wire.EncryptedContent(encrypted_content=data):
                out.append(Text(UNREADABLE if data.startswith(ENCRYPTED) or not data else data))
            case _ if takes == "text":
                raise invalid(f"{place}.type", "this message takes no images and files")
            case wire.InputImage():
                out.append(_image(part, place, from_tool=takes == "results"))
            case wire.InputFile():
                out.append(attachment(file_type(part.filename or part.file_url, part.file_data), place))
            case wire.InputAudio(input_audio=audio):
                out.append(attachment(f"audio/{audio.format or 'unknown'}", place))
    return tuple(out)


def _image(part: wire.InputImage, where: str, *, from_tool: bool) -> Part:
    if part.image_url is not None and part.file_id is None:
        return image_part(part.image_url, f"{where}.image_url", detail=part.detail, from_tool=from_tool)
    if from_tool:
        return attachment("image/unknown", where)
    raise invalid(f"{where}.image_url", "this field is required; file_id is not supported")


def follows(before: ContentPiece, piece: ContentPiece) -> bool:
    """True if `piece` continues the turn of `before`. Reasoning begins a turn; text may follow a call."""
    return piece.rank > before.rank or (before.rank == CALL and piece.rank != REASONING)


def join_pieces(turn: tuple[ContentPiece, ...]) -> Message:
    """Joins the items of an assistant turn into one message. One that names recorded items has the items beside them,
    too."""
    recalled = next((piece.handle for piece in turn if piece.recall), None)
    handle = recalled or next((piece.handle for piece in turn if piece.handle), None)
    parts = tuple(part for piece in turn for part in piece.parts)
    calls = tuple(piece.call for piece in turn if piece.call is not None)
    return Message("assistant", parts, calls, handle=handle, recall=recalled is not None)


MODES = ("none", "auto", "required", "any")

DEFAULT_NAMESPACE = "functions"

DROPPED_TOOLS = frozenset(
    {"web_search", "web_search_preview", "web_search_2025_08_26", "tool_search", "image_generation", "local_shell"}
)
"""Tools that harnesses declare by default and do not depend on: the model does not see them. Forcing one is refused."""


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
