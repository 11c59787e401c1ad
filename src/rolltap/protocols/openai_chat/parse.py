"""OpenAI Chat Completions: parses entries of `messages` into canonical messages."""

from __future__ import annotations

from rolltap.protocols.contents import attachment, check_arguments, data_type, file_type, image_part
from rolltap.protocols.conversation import Message, Part, Reasoning, Text, ToolCall
from rolltap.protocols.openai_chat import wire
from rolltap.protocols.requests import decode, invalid


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
        return Message("tool", _parts(entry), tool_call_id=entry.tool_call_id or entry.id or "", name=entry.name)
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
        where = f"content[{index}]"
        if isinstance(part, wire.TextPart):
            out.append(Text(part.text))
        elif isinstance(part, wire.RefusalPart):
            out.append(Text(part.refusal))
        elif entry.role not in ("user", "tool"):
            raise invalid(f"{where}.type", f"a {entry.role} message takes only text")
        elif isinstance(part, wire.ImagePart):
            image = part.image_url
            from_tool = entry.role == "tool"
            out.append(image_part(image.url, f"{where}.image_url.url", detail=image.detail, from_tool=from_tool))
        else:
            out.append(attachment(_media_type(part), where))
    return tuple(out)


def _media_type(part: wire.FilePart | wire.AudioPart | wire.AudioUrlPart | wire.VideoUrlPart) -> str:
    match part:
        case wire.FilePart(file=file):
            return file_type(file.filename, file.file_data)
        case wire.AudioPart(input_audio=audio):
            return f"audio/{audio.format or 'unknown'}"
        case wire.AudioUrlPart(audio_url=audio):
            return data_type(audio.url) or "audio/unknown"
        case wire.VideoUrlPart(video_url=video):
            return data_type(video.url) or "video/unknown"


def _tool_call(call: wire.WireToolCall, where: str) -> ToolCall:
    if call.type == "custom":
        if call.custom is None:
            raise invalid(f"{where}.custom", "this field is required")
        return ToolCall(call.id, call.custom.name, call.custom.input, "custom")
    if call.function is None:
        raise invalid(f"{where}.function", "this field is required")
    arguments = check_arguments(call.function.arguments, f"{where}.function.arguments")
    return ToolCall(call.id, call.function.name, arguments)
