"""Anthropic Messages: parses `system` and entries of `messages` into canonical messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolltap.protocols.anthropic import wire
from rolltap.protocols.contents import attachment, image_part, text_of
from rolltap.protocols.conversation import Message, Part, Reasoning, Text, Tool, ToolCall
from rolltap.protocols.replies import encode
from rolltap.protocols.requests import decode, invalid

BILLING_HEADER = "x-anthropic-billing-header:"
EMPTY_TEXT = "[System: Empty message content sanitised to satisfy protocol]"


@dataclass(frozen=True, slots=True)
class MessageEntry:
    """An entry of `messages`, parsed. With `references`, it must be parsed again with the deferred tools."""

    messages: tuple[Message, ...]
    references: bool = False


def parse_system(raw: bytes) -> Message | None:
    """Parses `system` without the billing header. Returns None if nothing is left."""
    content = decode(raw, str | list[wire.TextBlock], "system")  # type: ignore[arg-type]
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    parts = tuple(Text(text) for text in texts if text and not text.startswith(BILLING_HEADER))
    return Message("system", parts) if parts else None


def parse_entry(raw: bytes, deferred: Mapping[str, Tool]) -> MessageEntry:
    """Parses an entry of `messages`. References to `deferred` tools become their definitions."""
    entry = decode(raw, wire.WireMessage)
    blocks = [wire.TextBlock(entry.content)] if isinstance(entry.content, str) else entry.content
    if entry.role == "assistant":
        return MessageEntry((_assistant(blocks),))
    messages: list[Message] = []
    parts: list[Part] = []
    references = False
    for index, block in enumerate(blocks):
        where = f"content[{index}]"
        if isinstance(block, wire.ToolResultBlock) and entry.role == "user":
            if parts:
                messages.append(Message("user", tuple(parts)))
                parts = []
            content = block.content
            references = references or (
                isinstance(content, list) and any(isinstance(part, wire.ToolReferenceBlock) for part in content)
            )
            messages.append(_tool_result(block, where, deferred))
        else:
            parts += _user_part(block, where, entry.role)
    if parts or not messages:
        messages.append(Message(entry.role, tuple(parts)))
    return MessageEntry(tuple(messages), references)


def _assistant(blocks: Sequence[wire.Block]) -> Message:
    parts: list[Part] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        match block:
            case wire.TextBlock(text):
                if text and text != EMPTY_TEXT:
                    parts.append(Text(text))
            case wire.ThinkingBlock(thinking, signature):
                parts.append(Reasoning(thinking, signature or None))
            case wire.RedactedThinkingBlock(data):
                parts.append(Reasoning("", data))
            case wire.ToolUseBlock():
                calls.append(ToolCall(block.id, block.name, text_of(block.input, f"content[{index}].input")))
            case _:
                raise invalid(f"content[{index}].type", "an assistant message takes text, thinking and tool_use")
    return Message("assistant", tuple(parts), tuple(calls))


def _user_part(block: wire.Block, where: str, role: str) -> list[Part]:
    if isinstance(block, wire.TextBlock):
        return [Text(block.text)] if block.text else []
    if role == "user" and isinstance(block, wire.ImageBlock | wire.DocumentBlock | wire.SearchResultBlock):
        return _media(block, where, from_tool=False)
    raise invalid(f"{where}.type", f"a {role} message does not take this block")


def _tool_result(block: wire.ToolResultBlock, where: str, deferred: Mapping[str, Tool]) -> Message:
    content = [wire.TextBlock(block.content)] if isinstance(block.content, str) else block.content or []
    parts: list[Part] = []
    for index, part in enumerate(content):
        match part:
            case wire.TextBlock(text):
                parts += [Text(text)] if text else []
            case wire.ToolReferenceBlock(tool_name):
                parts.append(Text(_definition(tool_name, deferred)))
            case _:
                parts += _media(part, f"{where}.content[{index}]", from_tool=True)
    return Message("tool", tuple(parts), tool_call_id=block.tool_use_id, is_error=bool(block.is_error))


def _media(
    block: wire.ImageBlock | wire.DocumentBlock | wire.SearchResultBlock, where: str, *, from_tool: bool
) -> list[Part]:
    """The parts of a block that is not text: an image, a document with text or without, a search result."""
    match block:
        case wire.ImageBlock(source=wire.Base64Source(media_type, data)):
            return [image_part(f"data:{media_type};base64,{data}", f"{where}.source.data", from_tool=from_tool)]
        case wire.ImageBlock(source=wire.UrlSource(url)):
            return [image_part(url, f"{where}.source.url", from_tool=from_tool)]
        case wire.ImageBlock():
            return [attachment("image/unknown", where)]
        case wire.DocumentBlock(source=wire.TextSource(data)):
            return [Text(data)]
        case wire.DocumentBlock(source=wire.ContentSource(content)):
            blocks = [wire.TextBlock(content)] if isinstance(content, str) else content
            inner = f"{where}.source.content"
            return [
                part
                for index, item in enumerate(blocks)
                for part in (
                    [Text(item.text)]
                    if isinstance(item, wire.TextBlock)
                    else _media(item, f"{inner}[{index}]", from_tool=from_tool)
                )
            ]
        case wire.DocumentBlock(source=wire.Base64Source(media_type)):
            return [attachment(media_type, where)]
        case wire.DocumentBlock(source=wire.UrlSource()):
            return [attachment("application/pdf", where)]  # the protocol has URLs for PDFs only
        case wire.DocumentBlock():
            return [attachment("", where)]
        case wire.SearchResultBlock(source, title, texts):
            return [Text("\n".join([title, source, *(text.text for text in texts)]))]


def _definition(name: str, deferred: Mapping[str, Tool]) -> str:
    """Returns a deferred tool's definition as the model reads it; for a tool that is not deferred, its name."""
    tool = deferred.get(name)
    if tool is None:
        return name
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return encode({"type": "function", "function": function}).decode()
