"""OpenAI Chat Completions: parses entries of `messages` into canonical messages."""

from __future__ import annotations

from rolltap.proxy.conversation.chat import (
    Image,
    Message,
    Part,
    Reasoning,
    Text,
    ToolCall,
)
from rolltap.proxy.dialects import openai_chat_wire as wire
from rolltap.proxy.dialects.arguments import check_arguments
from rolltap.proxy.dialects.json_request import check_image, decode, invalid


def parse_message(raw: bytes) -> Message:
    """Parses an entry of `messages`."""
    entry = decode(raw, wire.WireMessage)
    for field in ("function_call", "audio"):
        if getattr(entry, field) is not None:
            raise invalid(field, "this field is not supported; use tool_calls and text")
    for field in ("prefix", "partial"):
        if getattr(entry, field):
            raise invalid(field, "a reply can't go on within a message (no prefill); leave it out for a new turn")
    if entry.role == "tool":
        call_id = entry.tool_call_id or entry.id
        if not call_id:
            raise invalid("tool_call_id", "this field is required in a tool message")
        return Message("tool", _parts(entry), tool_call_id=call_id, name=entry.name)
    if entry.role != "assistant":
        if entry.content is None:
            raise invalid("content", f"this field is required in a {entry.role} message")
        return Message(entry.role, _parts(entry), name=entry.name)
    parts = _parts(entry)
    if thinking := entry.reasoning_content or entry.reasoning:
        parts = (Reasoning(thinking), *parts)
    if entry.refusal and entry.content is None:
        parts = (*parts, Text(entry.refusal))
    calls = tuple(_tool_call(call, f"tool_calls[{index}]") for index, call in enumerate(entry.tool_calls or ()))
    return Message("assistant", parts, calls, name=entry.name)


def _parts(entry: wire.WireMessage) -> tuple[Part, ...]:
    if isinstance(entry.content, str):
        return (Text(entry.content),) if entry.content else ()
    out: list[Part] = []
    for index, part in enumerate(entry.content or ()):
        match part:
            case wire.TextPart(text=text) | wire.RefusalPart(refusal=text):
                out.append(Text(text))
            case wire.ImagePart(image_url=image):
                if entry.role not in ("user", "tool"):
                    raise invalid(f"content[{index}].type", f"a {entry.role} message takes no images")
                out.append(Image(check_image(image.url, f"content[{index}].image_url.url"), image.detail))
    return tuple(out)


def _tool_call(call: wire.WireToolCall, where: str) -> ToolCall:
    if call.type == "custom":
        if call.custom is None:
            raise invalid(f"{where}.custom", "this field is required")
        return ToolCall(call.id, call.custom.name, call.custom.input, "custom")
    if call.function is None:
        raise invalid(f"{where}.function", "this field is required")
    arguments = check_arguments(call.function.arguments, f"{where}.function.arguments")
    return ToolCall(call.id, call.function.name, arguments)
